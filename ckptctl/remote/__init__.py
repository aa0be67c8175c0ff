"""Files that lie elsewhere: a folder of placeholders here, and their bytes by range requests when somebody reads.

address.py    hf://owner/name[@revision][/path], as data
places.py     which paths are placeholders, and what reads their bytes; no network
folder.py     the folder of placeholders, and the bytes of headers that were read already
ranges.py     ranges of one file by HTTP: redirects, retries, and every answer checked
hub.py        what huggingface_hub knows: the commit of a revision, its files, their addresses, the user's token
repository.py a repository that is written to: commits, pull requests, what it holds; nothing is kept here between calls
refusals.py   errors of huggingface_hub as the user's; which of them are worth another try
"""
