"""What should I set? The fastest configuration of a space that trains the same, and what each choice bought."""
