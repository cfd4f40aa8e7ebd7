vllm serve --model TheBloke/Llama-2-7B-Chat-GGUF --quantization gguf --gguf-file llama-2-7b-chat.Q8_0.gguf
