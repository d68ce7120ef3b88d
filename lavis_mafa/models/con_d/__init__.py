"""The connection discriminator (Con-D) as a LAVIS model."""
