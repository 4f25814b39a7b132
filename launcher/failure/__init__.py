"""What is made of a failure: facts, symptoms, the verdict, the story that is told, and the last words."""
