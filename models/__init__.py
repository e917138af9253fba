"""Data, training and evaluation of the shipped model, which lies in `home` and `home-draft`."""
