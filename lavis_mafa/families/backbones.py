"""Model families: for each, a driver (`Backbone`) and the LAVIS models that it drives."""
