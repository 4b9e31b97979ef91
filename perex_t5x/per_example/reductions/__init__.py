"""How the gradients that one place of the program produces are reduced over examples."""
