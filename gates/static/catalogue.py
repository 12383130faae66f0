"""The catalogue of what the static gate can say: one code for each reason, by noun.

A code never changes its meaning; a new reason is a new code.
"""

from collections.abc import Mapping
from typing import Final

from gates.static.catalogue_words import WORDS
from gates.static.code import BLOCK, INFO, WARN, Code, codes

CODES: Final[Mapping[str, Code]] = {
    **codes(
        "files",
        lfs_pointer=(
            (BLOCK,),
            "A Git-LFS pointer lies where the file should be.",
            "Fetch the file itself: git lfs pull, or from the Hub.",
        ),
        empty_file=(
            (BLOCK,),
            "A file that engines read has 0 bytes.",
            "Fetch the file again; perhaps its transfer has not ended.",
        ),
        config_unparseable=(
            (BLOCK,),
            "A JSON or text file cannot be read, or parsers disagree on it.",
            "Fetch the file again, and say each key once.",
        ),
        header_invalid=(
            (BLOCK,),
            "A weight file's header is not sound.",
            "Fetch the file again; if it stays so, write it anew with its library.",
        ),
        file_foreign=((BLOCK,), "A file is something else than its name says.", "Fetch the real file."),
        file_missing=((BLOCK,), "A file that the bundle names is not there.", "Stage the bundle again."),
        file_irregular=((BLOCK,), "A name is no regular file.", "Replace it by the file that it stands for."),
        name_refused=((BLOCK,), "A name that some system reads otherwise.", "Rename the file, or leave it out."),
        dangling_link=(
            (BLOCK,),
            "A link leads to what is not there.",
            "Copy the blobs with the snapshot, or download it again.",
        ),
        link_escapes_root=(
            (BLOCK,),
            "A link leads out of the directory.",
            "Replace it by the file; only the Hub cache's own links to blobs are followed.",
        ),
        case_collision=(
            (BLOCK,),
            "Names that differ only in case, or a known name in unusual case.",
            "Keep one, under the name that engines read.",
        ),
        source_unstable=(
            (BLOCK,),
            "A file changed while it was read, or its transfer has not ended.",
            "Wait until the transfer has ended, and check again.",
        ),
        weights_absent=(
            (BLOCK, INFO),
            "There are no weights; with nothing but a configuration, that alone is checked.",
            "Fetch the weights.",
        ),
        config_missing=((BLOCK,), "There is no config.json.", "Fetch config.json from where the weights came from."),
        formats_mixed=(
            (BLOCK,),
            "There are weights in two formats.",
            "Leave one of them out.",
        ),
        weights_several=(
            (INFO,),
            "There are several models in GGUF, or one in several quantizations, and one of them was looked at.",
            "Choose one with --weights, as creating a bundle asks for too.",
        ),
        format_unsupported=(
            (BLOCK,),
            "The engine is not given the weights' or an adapter's format: llama.cpp takes GGUF, others safetensors.",
            "Convert the weights, or choose an engine that reads them.",
        ),
        pickle_weights=(
            (BLOCK, INFO),
            "Pickled files are the only or the preferred weights; beside others they are left out.",
            "Convert them to safetensors on a machine that may run their code.",
        ),
        remote_code=(
            (BLOCK,),
            "The engine would run code that came with the files.",
            "Use an engine that has this model built in; code needs an exception of its own.",
        ),
        code_left_out=(
            (INFO,),
            "Files of code that no engine runs.",
            "Nothing; a bundle leaves them out.",
        ),
        launch_refused=(
            (BLOCK,),
            "The launch would load what is not in the bundle, or leave its sandbox.",
            "Leave the argument or variable out; what is served comes from the bundle's files.",
        ),
        role_hides=(
            (BLOCK,),
            "The role of a file says that it is for people, and the engine reads it.",
            "Give it the role in which the engine reads it, or leave it out.",
        ),
        weights_foreign=(
            (BLOCK,),
            "A file with a role is weights or a graph of another program.",
            "Leave it out; no engine needs it from a bundle.",
        ),
        archive=(
            (BLOCK,),
            "An archive, into which nobody has looked.",
            "Leave it out, or unpack and check it.",
        ),
        program=(
            (BLOCK,),
            "A program or a library of machine code.",
            "Leave it out; what an engine loads is part of the engine.",
        ),
    ),
    **codes(
        "index",
        index_invalid=(
            (BLOCK,),
            "The index is no map from tensors to files beside it.",
            "Write the index anew.",
        ),
        shard_missing=(
            (BLOCK,),
            "A file of a set is not there.",
            "Fetch the missing files.",
        ),
        index_tensor_absent=(
            (BLOCK,),
            "The index reads a tensor from a file that does not hold it.",
            "Fetch that file again, or mend the index.",
        ),
        tensors_unreachable=(
            (BLOCK,),
            "Files hold tensors that the index does not name.",
            "Write the index anew over all files.",
        ),
        total_size_wrong=(
            (WARN,),
            "The index says another size than its tensors have.",
            "Write the index anew; some loaders plan memory by it.",
        ),
        shard_orphan=(
            (WARN,),
            "The index reads nothing from a weight file.",
            "Leave the file out, or name its tensors in the index.",
        ),
        duplicate_weight_sets=(
            (WARN, BLOCK),
            "The weights are there twice; it blocks when the load format takes both.",
            "Leave one set out, or choose a load format that follows the index.",
        ),
        index_decides=(
            (INFO,),
            "The index reads a tensor from another file than one that also holds it.",
            "Nothing; what the index names is what counts.",
        ),
    ),
    **codes(
        "weights",
        tensor_missing=(
            (BLOCK,),
            "A tensor that the architecture needs is in no file.",
            "Fetch the weights again, or mend num_hidden_layers.",
        ),
        layers_beyond=(
            (BLOCK,),
            "Files hold whole layers that the configuration does not count.",
            "Set num_hidden_layers to the layers that there are, or use the config.json of these weights.",
        ),
        head_missing=(
            (BLOCK,),
            "The head is not tied, and no file holds it.",
            "Set tie_word_embeddings to true if the head is tied, or write lm_head.weight.",
        ),
        head_untied=(
            (WARN,),
            "The head is declared as tied, and a file holds another; engines use one or the other.",
            "Set tie_word_embeddings to false if the head was trained, else leave it out.",
        ),
        shape_mismatch=(
            (BLOCK,),
            "A tensor has another shape than the configuration makes it.",
            "Use the config.json that belongs to these weights.",
        ),
        embedding_rows=(
            (BLOCK,),
            "Embedding or head has another number of rows than vocab_size.",
            "Set vocab_size to the rows, or write the rows that are missing.",
        ),
        size_absurd=(
            (BLOCK,),
            "A size in the configuration is none that a model has.",
            "Use the config.json that belongs to these weights.",
        ),
        non_finite_weight=(
            (BLOCK,),
            "A weight is NaN or infinite.",
            "Fetch the file again; if it stays so, the conversion was wrong.",
        ),
        constant_weight=(
            (WARN,),
            "A matrix never varies, although its neighbours do.",
            "Fetch the file again; perhaps a part of it was never written.",
        ),
    ),
    **WORDS,
    **codes(
        "quantization",
        quant_config_mismatch=(
            (BLOCK,),
            "Configuration and tensors disagree about quantization.",
            "Use the config.json that belongs to these weights.",
        ),
        g_idx_invalid=(
            (BLOCK,),
            "A GPTQ column order does not fit its groups.",
            "Quantize again, or write the order that the scales were made for.",
        ),
        g_idx_missing=(
            (BLOCK,),
            "desc_act is true, and the column order is not there.",
            "Fetch the whole checkpoint, or set desc_act to what was used.",
        ),
        quant_bits_unsupported=(
            (BLOCK,),
            "The engine cannot unpack this number of bits.",
            "Quantize to a number of bits that it unpacks.",
        ),
        quant_method_unsupported=(
            (BLOCK,),
            "The engine does not read this method, or has no kernel for it in this type of numbers.",
            "Choose another engine or method.",
        ),
        kv_scales_missing=(
            (WARN,),
            "The cache is one of 8-bit floats, and layers have no scales for it.",
            "Calibrate the scales, or leave the cache in the model's numbers; goldens show what it costs.",
        ),
        quant_argument_differs=(
            (BLOCK,),
            "The launch arguments name another method than the files.",
            "Leave the argument out, so that the files decide.",
        ),
        quant_patterns_slow=(
            (BLOCK,),
            "The patterns of modules in the configuration take too long to be tried.",
            "Name the modules, or write patterns with fewer open repetitions such as .* in a row.",
        ),
        quant_lib_rejects=(
            (BLOCK,),
            "A library in the engine's image refuses the configuration.",
            "Use an image with a newer library, or take the field out.",
        ),
    ),
    **codes(
        "topology",
        heads_tp=(
            (BLOCK,),
            "Attention heads cannot be divided over the devices.",
            "Choose a tensor parallel degree that divides them.",
        ),
        kv_heads_lt_tp=(
            (BLOCK,),
            "Key-value heads can be neither divided nor copied over the devices.",
            "Choose a degree that divides them, or an engine that copies them.",
        ),
        kv_replicated=(
            (INFO,),
            "Key-value heads are copied, so that the KV cache per GPU shrinks no further.",
            "Nothing; count the cache as for fewer devices.",
        ),
        intermediate_tp=(
            (BLOCK,),
            "An inner size cannot be divided over the devices.",
            "Choose a tensor parallel degree that divides it.",
        ),
        layers_pp=(
            (BLOCK,),
            "There are fewer layers than pipeline stages.",
            "Choose a smaller pipeline parallel degree.",
        ),
        experts_ep=(
            (BLOCK,),
            "Experts cannot be divided over the devices; vLLM may spread a remainder.",
            "Choose an expert parallel degree that divides them.",
        ),
        quant_group_tp=(
            (BLOCK,),
            "Quantization groups are cut by tensor parallelism.",
            "Choose one of the degrees that fit, or quantize with smaller groups.",
        ),
        fp8_block_tp=(
            (BLOCK,),
            "Blocks of 8-bit scales are cut by tensor parallelism.",
            "Choose one of the degrees that fit.",
        ),
        arch_unsupported=(
            (BLOCK, WARN),
            "The GPUs do not compute in the weights' number format.",
            "Choose newer GPUs, or weights in another format.",
        ),
        topology_arguments_differ=(
            (BLOCK,),
            "Topology and launch arguments name different degrees.",
            "Say the same in both.",
        ),
        devices_short=(
            (BLOCK,),
            "The layout takes more devices than there are.",
            "Ask for the devices that the layout takes.",
        ),
    ),
    **codes(
        "context",
        context_too_long=(
            (BLOCK, WARN),
            "More context is asked for than the model has positions. Warns if --ctx-size is, and nobody counts slots.",
            "Ask for less, or declare a rotary scaling that the model was made for.",
        ),
        config_sources_disagree=(
            (BLOCK,),
            "The configuration that the engine reads allows less than the other one.",
            "Ask for what the source in force allows, or change the format flag.",
        ),
        context_per_slot=(
            (BLOCK,),
            "A shared context gives each slot less than is promised.",
            "Ask for slots times the promised context.",
        ),
        rope_format=(
            (BLOCK,),
            "Rotary settings stand where a library does not look, or in two places with two values.",
            "State rope_theta where the image's transformers reads it.",
        ),
        rope_scaling_invalid=(
            (BLOCK,),
            "A rotary scaling has an impossible factor.",
            "Correct rope_scaling.",
        ),
    ),
    **codes(
        "adapters",
        adapter_incomplete=(
            (BLOCK,),
            "An adapter lacks its configuration, weights or rank.",
            "Fetch the whole adapter.",
        ),
        adapter_misplaced=((BLOCK,), "An adapter lies among its base's own files.", "Move it to adapters/NAME/."),
        lora_no_match=(
            (BLOCK, WARN),
            "Modules of the adapter are not in the base, or a flag keeps them out.",
            "Rename its modules to the base's, or change the flag.",
        ),
        lora_shape=(
            (BLOCK,),
            "An adapter's matrices do not fit the base or the rank.",
            "Use the base that the adapter was trained on.",
        ),
        lora_targets_differ=(
            (BLOCK, WARN),
            "The adapter's modules are not those that its configuration names; whole layers without any warn.",
            "Fetch the adapter and its configuration together again.",
        ),
        lora_rank_too_large=(
            (BLOCK,),
            "The rank is larger than the engine takes.",
            "Raise the engine's largest rank.",
        ),
        lora_scaling=(
            (BLOCK, WARN),
            "The engine ignores rank-stabilised scaling; it warns when that is not known.",
            "Choose an engine that honours use_rslora, or fold the scale into lora_alpha.",
        ),
        lora_kind_unsupported=(
            (BLOCK, WARN),
            "The engine does not read this kind of adapter; it warns when that is not known.",
            "Merge the adapter into the base, or choose another engine.",
        ),
        adapter_no_effect=(
            (BLOCK,),
            "The adapter changes nothing.",
            "Use the trained adapter.",
        ),
        lora_new_tokens=(
            (BLOCK,),
            "The adapter's tokenizer has tokens of its own.",
            "Merge the adapter into a base with these tokens.",
        ),
        unsupported_lora_tensor=(
            (BLOCK,),
            "The adapter holds rows of the embedding.",
            "Merge the adapter into the base.",
        ),
    ),
    **codes(
        "draft",
        draft_incomplete=(
            (BLOCK,),
            "The draft lacks its configuration.",
            "Fetch the whole draft model.",
        ),
        draft_vocab=(
            (BLOCK, WARN),
            "The draft does not speak the target's tokens; padding alone warns.",
            "Use a draft of the same family.",
        ),
        draft_shape=(
            (BLOCK,),
            "A head that drafts from the target's own states has other sizes than the target.",
            "Use the head that was trained on this target.",
        ),
        draft_method_unknown=((WARN,), "The engine is not known to draft by that method.", "Write one that it has."),
    ),
    **codes(
        "serving",
        engine_unknown=(
            (BLOCK, WARN),
            "Nothing is known of the declared engine; it warns where the name is near none that is known.",
            "Write the name of an engine that has a driver.",
        ),
        engine_version_untried=(
            (WARN,),
            "The declared version is none that the engine's driver starts.",
            "Name a version that is started here, or expect its own rules alone to be checked.",
        ),
        accelerator_unknown=(
            (WARN,),
            "The declared accelerator is in no table, so checks of its architecture are left out.",
            "Write its SKU, such as nvidia-h100, or its compute capability, such as sm_90.",
        ),
        argument_unknown=(
            (BLOCK, WARN),
            "An unknown launch argument; it warns where the driver alone lacks it, in near versions, or if outdated.",
            "Write an argument that the engine and its driver take.",
        ),
        argument_value=(
            (BLOCK, WARN),
            "An argument's value is missing or out of its range, or it is there twice; it warns where the last counts.",
            "Give it once, with a value in its range.",
        ),
        served_name_refused=((BLOCK,), "The engine refuses the served name.", "Serve it under a name that it takes."),
        served_name_differs=(
            (BLOCK,),
            "The served name is not the one that callers are told.",
            "Say the same name in both.",
        ),
        tool_parser_missing=(
            (BLOCK,),
            "Tools are declared, and nothing parses the model's calls.",
            "Name the model's tool parser in the launch arguments, or use a template that writes calls.",
        ),
        head_absent_for_feature=(
            (BLOCK,),
            "A declared feature needs a language-model head that the class does not have.",
            "Do not declare the feature, or use the generating class.",
        ),
        feature_not_served=(
            (BLOCK,),
            "The engine does not serve a declared feature with this model and these arguments.",
            "Take the argument out, or do not declare the feature.",
        ),
        drain_too_short=(
            (BLOCK,),
            "A replica is killed before its streams can end.",
            "Allow at least pre-stop and draining time together.",
        ),
    ),
}
