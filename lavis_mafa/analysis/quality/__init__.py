"""How good a Con-D is: by truth, by people, and beside another."""
