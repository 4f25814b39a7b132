"""Who may come in: tokens, certificates, secrets; what is said and counted of those who may not."""
