"""Attacks on what this library sends and serves: how much of the records do they find?"""
