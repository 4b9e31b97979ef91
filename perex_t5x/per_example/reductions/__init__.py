"""How the gradients of one equation are reduced over examples."""
