"""Answers taken apart as a model's own files tell: the template, its fields, and the time that its patterns have."""
