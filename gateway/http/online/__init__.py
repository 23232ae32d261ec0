"""Background training of a model while it serves: examples go in, versions come out.

POST /train ──► examples (kept on disk) ──► Learner: batch, step, publish ──► versions, sampled from by name
"""
