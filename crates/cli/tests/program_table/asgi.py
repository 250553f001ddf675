"""Serves the files of a folder by uvicorn on uvloop, on both families."""

import sys

import uvicorn


async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    with open(sys.argv[1] + scope["path"], "rb") as file:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while piece := file.read(65536):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


uvicorn.run(app, host="", port=8080, loop="uvloop", http="httptools", log_level="warning")
