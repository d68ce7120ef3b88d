"""The drivers (`Backbone`) of the model families."""
