"""Tools around the training data; each runs as `python data_tools/NAME.py`."""
