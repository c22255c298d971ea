"""/openapi.json: the routes and their types, described.

document.py renders it; fields.py holds the meaning of each request field as a `FieldDoc`
(field_doc.py); response_types.py has the bodies of OpenAI's and vLLM's routes as types.
"""
