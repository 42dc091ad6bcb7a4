// Every option of a session, in words for everybody: what the form for a new session is made of.
// `kind` says how it is typed; of `choices` the first is what counts if nobody chooses; `more` are shown on demand.

export const OPTIONS = [
  { name: "model", label: "Model", kind: "text", wide: true, required: "", placeholder: "owner/name at huggingface.co, a folder, or a .gguf file" },
  { name: "quantisation", label: "Quantisation", kind: "text", choices: ["stored", "fp32", "fp16", "int8", "int4"], hint: "int4 takes the least memory, and is the fastest; stored: as the files have it" },
  { name: "context", label: "Context, tokens", kind: "number", min: 1, placeholder: "4096", hint: "What the model can look back on" },
  { name: "shares", label: "Shares", kind: "numbers", placeholder: "by measured speed", hint: "How much each machine gets" },

  { name: "name", label: "Name", kind: "text", more: true, placeholder: "the model's own", hint: "What programs call it" },
  { name: "nodes", label: "Machines", kind: "list", more: true, placeholder: "all, the fastest first", hint: "Names such as pc, laptop; webgpu@pc is the GPU of pc" },
  { name: "stages", label: "Stages", kind: "stages", more: true, placeholder: "what is quickest", hint: "Over slow links: 2 has each half of the machines hold half of the layers; 2+1: two machines, then one" },
  { name: "engine", label: "Engine", kind: "text", more: true, placeholder: "onnxruntime, on processors", hint: "What computes: onnxruntime on processors, cuda or webgpu on GPUs" },
  { name: "engines", label: "Engine by machine", kind: "map", more: true, placeholder: "gaming-pc=cuda" },
  { name: "engine_options", label: "Engine's settings", kind: "map", more: true, placeholder: "device=cuda" },
  { name: "quantisations", label: "Quantisation by machine", kind: "map", more: true, placeholder: "gaming-pc=fp16" },
  { name: "block", label: "Quantisation block", kind: "number", more: true, choices: ["128", "16", "32", "64", "256"], hint: "Weights that share a scale; fewer are more exact" },
  { name: "threads", label: "Threads", kind: "number", more: true, min: 0, placeholder: "every core", hint: "On each machine" },
  { name: "wire", label: "Numbers between machines", kind: "text", more: true, choices: ["fp32", "bf16", "int8"], hint: "bf16 and int8 are for slow networks" },
  { name: "sequences", label: "Requests at a time", kind: "number", more: true, min: 1, max: 256, placeholder: "64" },
  { name: "queue", label: "Requests that may wait", kind: "number", more: true, min: 0, max: 4096, placeholder: "256" },
  { name: "cache_tokens", label: "Cache, tokens", kind: "number", more: true, min: 1, placeholder: "one context", hint: "What all chats together may look back on" },
  { name: "cache_disk_tokens", label: "Cache on disks, tokens", kind: "number", more: true, min: 1, placeholder: "none" },
  { name: "cache_node_tokens", label: "Cache on other machines, tokens", kind: "number", more: true, min: 1, placeholder: "none" },
  { name: "cache_format", label: "Cache format", kind: "text", more: true, choices: ["fp32", "fp16", "int8"], hint: "fp16 takes half the memory, int8 a quarter" },
  { name: "draft_model", label: "Draft model", kind: "text", more: true, placeholder: "none", hint: "A small model that guesses tokens, which can make a large one faster" },
  { name: "draft_engine", label: "Draft model's engine", kind: "text", more: true, placeholder: "as the model's" },
  { name: "experts", label: "Experts", kind: "text", more: true, choices: ["auto", "sliced", "parallel"], hint: "Of models that have some: a slice of each everywhere, or whole ones on machines" },
  { name: "replicas", label: "Copies of each expert", kind: "number", more: true, min: 1, max: 64, placeholder: "1", hint: "With 2, a machine may be lost" },
  { name: "trunk", label: "Machines for the rest", kind: "number", more: true, min: 1, placeholder: "1", hint: "Where experts are on machines of their own" },
  { name: "keep_prefixes", label: "Keep prompts that it knows on disk, for its next start", kind: "switch", more: true },
  { name: "exact", label: "Exact: the same answers, to the bit, however it is cut", kind: "switch", more: true },
  { name: "recover", label: "When a machine is lost, go on with the others", kind: "switch", more: true, on: true },
];
