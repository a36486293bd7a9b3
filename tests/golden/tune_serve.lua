-- args: tune --serve --device h200 --precision bf16,int8 --latency 0.5 --within 300 SCRIPT layers=2 embed=1024 heads=8 kv_heads=4 ffn=2048 vocab=1024 seq=4096 </dev/null 2>&1 | sed 's/ in [0-9.]* s;/;/'
-- How a small model is served within half a millisecond a token: texts at once, weights, and what bounds each.
dofile "models/llama.lua"
