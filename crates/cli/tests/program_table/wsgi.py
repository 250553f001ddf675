"""Serves the files of the folder $ROOT by WSGI."""

import os


def app(environ, start):
    start("200 OK", [])
    file = open(os.environ["ROOT"] + environ["PATH_INFO"], "rb")
    return iter(lambda: file.read(65536), b"")
