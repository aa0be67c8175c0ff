"""Native runs: the real framework takes a checkpoint up in processes of its own, and the same steps are compared.

`planning` says which framework, and what it must be told; `launch` starts the ranks; the modules `run_*` are what runs
in them, with `rank` as what they share: those import no ckptctl, so that any interpreter with the framework will do.
`running` makes a record of what they tell, `comparing` the document's part.
"""
