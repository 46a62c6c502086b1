"""What runs in the API process: from a request to budgets, fields and placeholders."""
