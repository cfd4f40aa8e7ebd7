vllm serve meta-llama/Llama-3.1-8B-Instruct --enable-lora --lora-modules customer-support=./a --lora-extra-vocab-size 256
