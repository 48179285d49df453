"""The tasks that the nano model is trained and measured on: a training part and a held-out part, disjoint by construction."""
