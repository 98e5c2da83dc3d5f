"""Parts of the prefix index: who holds which block, how far each worker's news can be trusted, what is learned without news."""
