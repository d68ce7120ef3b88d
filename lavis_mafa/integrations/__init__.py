"""The method in other libraries' trainers; each module needs its library and no LAVIS."""
