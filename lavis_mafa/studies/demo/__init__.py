"""The main job: Con-D, GRIT-VLP and MAFA on the toy world, compared."""
