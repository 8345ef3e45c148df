JAX_COORDINATOR_ADDRESS=127.0.0.1:PORT JAX_NUM_PROCESSES=4 JAX_PROCESS_ID=0 python -m capibara.train --gin_file=base_v5e64.gin &
JAX_COORDINATOR_ADDRESS=127.0.0.1:PORT JAX_NUM_PROCESSES=4 JAX_PROCESS_ID=1 python -m capibara.train --gin_file=base_v5e64.gin &
JAX_COORDINATOR_ADDRESS=127.0.0.1:PORT JAX_NUM_PROCESSES=4 JAX_PROCESS_ID=2 python -m capibara.train --gin_file=base_v5e64.gin &
JAX_COORDINATOR_ADDRESS=127.0.0.1:PORT JAX_NUM_PROCESSES=4 JAX_PROCESS_ID=3 python -m capibara.train --gin_file=base_v5e64.gin &
