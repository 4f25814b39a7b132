"""What ranks that stand still, lag behind or differ tell of the reason. Pure."""
