"""Everyday speech: what people say to a home whose devices, kinds and rooms are drawn afresh."""
