"""Parts that the models of several families are built from."""
