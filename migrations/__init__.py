"""Database migrations, shipped with the product and run by `python -m migrations`."""
