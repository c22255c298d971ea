"""The ranks beyond the first: a process each, which does what rank 0 tells it over a socket.

messages.py    what is said, as msgpack
connection.py  one socket of rank 0, and the thread that serves all of them
group.py       rank 0's side: starts the processes, sends steps, notices who is lost
follower.py    the other side
"""
