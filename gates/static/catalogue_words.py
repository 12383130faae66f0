"""What the static gate can say of words: tokens, templates, stops and sampling. A part of the catalogue."""

from collections.abc import Mapping
from typing import Final

from gates.static.code import BLOCK, INFO, WARN, Code, codes

WORDS: Final[Mapping[str, Code]] = {
    **codes(
        "tokenizer",
        tokenizer_missing=(
            (BLOCK,),
            "There is no tokenizer, and features need one.",
            "Fetch tokenizer.json from where the weights came from.",
        ),
        vocabulary_exceeds_embedding=(
            (BLOCK, INFO),
            "The tokenizer has ids for which the embedding has no row.",
            "Use the tokenizer that belongs to these weights, or add the rows.",
        ),
        special_token_unknown=(
            (BLOCK, WARN),
            "A special token is not in the vocabulary and would be appended.",
            "Take it off the list, or add it to the tokenizer and the embedding.",
        ),
        token_id_out_of_range=(
            (BLOCK,),
            "A configuration names a token id that there is not.",
            "Use the ids of this tokenizer.",
        ),
        marker_split=(
            (BLOCK, WARN),
            "A marker that must be one token is split into pieces.",
            "Put it among added_tokens of tokenizer.json, as it was.",
        ),
        tokenizer_unloadable=(
            (BLOCK,),
            "The tokenizer's library does not load its file.",
            "Fetch the file again, or write it anew with its library.",
        ),
        token_ids_differ=(
            (BLOCK,),
            "A token has two ids: what a file says, and what its library or another file gives it.",
            "Give the token one id in every file: the one that the model was trained with.",
        ),
        stop_after_prompt=(
            (WARN, INFO),
            "The tokenizer ends every text with a stop, so that a prompt is over before its answer begins.",
            "Take the token out of the post-processor, or out of add_eos_token.",
        ),
        double_bos=(
            (WARN, INFO),
            "Template and tokenizer both write the first token.",
            "Tokenize rendered prompts without special tokens, or take BOS out of one of the two.",
        ),
    ),
    **codes(
        "template",
        template_missing=(
            (BLOCK,),
            "Chat is served, without a template; of files for llama.cpp also where no features are named.",
            "Add chat_template.jinja, or declare features without chat.",
        ),
        template_fails=(
            (BLOCK,),
            "The template cannot render a plain question.",
            "Mend the template at the place named.",
        ),
        template_sources_disagree=(
            (WARN,),
            "Two files hold different templates.",
            "Keep one of them.",
        ),
        template_clock=(
            (WARN,),
            "The template writes the date.",
            "Supply a fixed date, and record goldens with it; prefix caches miss every day.",
        ),
        template_drops_message=(
            (BLOCK,),
            "The template does not write a message.",
            "Use the template that belongs to this model.",
        ),
        system_role_unsupported=(
            (BLOCK,),
            "system_role is declared, and the template refuses or drops it.",
            "Do not declare system_role, or use a template that writes it.",
        ),
        generation_prompt_missing=(
            (WARN,),
            "The template does not open the assistant's turn where the model shall begin.",
            "Write the opening when add_generation_prompt is true.",
        ),
        template_tool_schema=(
            (BLOCK, WARN),
            "The template breaks on tools whose parameters use $ref or anyOf.",
            "Resolve references before rendering, or read type only where it is defined.",
        ),
        template_tools_missing=(
            (BLOCK, WARN),
            "Tools are declared, and the template does not write them or what they answer; earlier calls alone warn.",
            "Use a template that writes tools, or do not declare them.",
        ),
        reasoning_parser_missing=(
            (BLOCK, INFO),
            "The template opens the reasoning, or the bundle declares it, and no parser closes it.",
            "Name the model's reasoning parser in the launch arguments.",
        ),
        parser_differs=(
            (BLOCK, WARN),
            "A parser reads another form than the template writes.",
            "Name the parser of the model's own family.",
        ),
        parser_tokens_missing=(
            (BLOCK,),
            "A parser needs tokens that the tokenizer does not have.",
            "Name the parser of the model's own family, or use the tokenizer that has its tokens.",
        ),
    ),
    **codes(
        "stops",
        eos_sources_disagree=(
            (WARN, BLOCK),
            "Files name different stop ids beside the tokenizer's own; it blocks when the engine does not know one.",
            "Name all stop ids in generation_config.json.",
        ),
        stop_set_overridden=(
            (BLOCK,),
            "A launch override takes stop ids away.",
            "Repeat eos_token_id in the override.",
        ),
        turn_end_not_a_stop=(
            (BLOCK, WARN),
            "The template ends an answer with a token at which nothing stops; of a base model it warns.",
            "Name its id in eos_token_id of generation_config.json.",
        ),
    ),
    **codes(
        "sampling",
        engine_sampling_diff=(
            (WARN,),
            "The engine does not apply the model's sampling defaults.",
            "Send them with every request, or state them in the launch arguments.",
        ),
        answers_limited=(
            (WARN,),
            "The engine ends answers at a number of tokens that generation_config.json says.",
            "Take max_new_tokens out of generation_config.json, or send max_tokens with every request.",
        ),
        sampling_out_of_range=(
            (BLOCK,),
            "A sampling default is no possible value.",
            "Correct generation_config.json.",
        ),
    ),
}
