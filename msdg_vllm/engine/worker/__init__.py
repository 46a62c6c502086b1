"""What runs in the worker: from pixels and specs to exactly the kept rows."""
