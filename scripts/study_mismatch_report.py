
import pyarrow.parquet as pq, numpy as np
def write_report(*a):
    from study_mismatch_runs import arrays
    for s in a[0]:
        r=a[1].find(s.arm,s.settings); e=a[1].find(s.samples.arm,s.samples.settings)
        d=[l-x for l,x in zip(arrays(r,"learner_logprobs"),arrays(e,"engine_logprobs"))]
        d=np.concatenate(d); print(s.arm,len(d),abs(d).mean(),d.std(),d.mean(),e.made,r.made,flush=True)
    return 0
