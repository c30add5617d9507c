"""Packages that speak OpenAI's protocol, used as their own documentation does, against `multilora openai`.

Each module is for one package; each of its public functions is a mode, which raises when package and front disagree.
"""
