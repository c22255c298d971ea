"""The ranks beyond the first: a process each, which does what rank 0 tells it over a socket.

processes.py   ranks that rank 0 starts on its own host
joining.py     ranks that come from other hosts
handshake.py   how they and rank 0 know each other
ray_ranks.py   ranks that Ray places
messages.py    what is said, as msgpack
connection.py  one socket of rank 0, and the thread that serves all of them
group.py       rank 0's side: starts the processes, sends steps, notices who is lost
follower.py    the other side
"""
