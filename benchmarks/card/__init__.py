"""`make gpu`: what a CUDA card is asked, in which order, and how nothing that it answers is lost.

| file | what it holds |
| --- | --- |
| preflight.py | what the run needs and this machine lacks |
| plan.py | the groups, in order, with their time |
| measure.py | the work of each group |
| child.py | what a process does: a group on the card, or a share of the kernels without one |
| run.py | the processes, one after another, and what becomes of one that fails |
| records.py, table.py | the file of results; the table, made of the file alone |
| pretend.py, pack.py | kernels compiled without a card; the file that carries them |
| launchers.py | Triton's own C code, compiled without a card |
"""
