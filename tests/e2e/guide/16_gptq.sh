vllm serve TheBloke/Llama-2-7B-Chat-GPTQ --quantization gptq
