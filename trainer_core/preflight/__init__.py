"""What a person learns before anything is loaded: plan, sizes, memory, disk."""
