"""HTTP below the APIs: no module here knows the engine or a model.

listener.py binds, connection.py limits a client in time, access.py checks key and host, bodies.py
reads and writes JSON, errors.py makes every failure a response, sse.py writes event streams.
"""
