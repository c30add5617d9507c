"""Packages that speak OpenAI's protocol, used as their own documentation does, against `multilora openai`.

Each module is for one package and has a function a mode, which raises when the package and the front disagree.
`python -m openai_clients.MODULE URL MODE...` tries some. Nothing here imports multilora: a module runs in the
environment of its package.
"""
