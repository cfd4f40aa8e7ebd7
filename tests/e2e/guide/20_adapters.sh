vllm serve meta-llama/Llama-3.1-8B-Instruct --enable-lora --lora-modules customer-support=./a finance=./b --max-loras 4 --max-lora-rank 64
