"""The sections of a run file, each key with its type, its default and one line of help.

`artel config explain` prints this file's descriptions, `artel config schema` its JSON schema. A key marked
`shapes_result=False` can change between two starts of the same run without changing what comes out (within float
tolerance); all others are compared when a run resumes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from artel.config.quantities import Bytes, Count, Interval, Number, Warmup, read_number


class Section(BaseModel):
    """A section refuses unknown keys, converts nothing silently and cannot be changed once read."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


def _free(default: Any, description: str, **more: Any) -> Any:
    """A key whose change does not change the result of a run."""
    return Field(default, description=description, json_schema_extra={"shapes_result": False}, **more)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _number_if_it_is_one(value: object) -> object:
    if isinstance(value, str):
        try:
            return read_number(value)
        except ValueError:
            return value
    return value


def _on_or_off(value: object) -> object:
    """YAML 1.1 reads `on` and `off` as booleans; here they are words."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Paths = Annotated[list[str], BeforeValidator(_as_list)]


class SourceConfig(Section):
    path: Paths = Field(
        default=[],
        description="File, glob, folder or http(s) URL, or a list of them; {stdlib} is Python's own library folder.",
    )
    format: Literal["auto", "text", "html", "jsonl", "pairs", "nq", "squad", "dummy"] = Field(
        "auto",
        description="What the files hold; auto goes by suffix (.html .htm .xhtml .shtml, .jsonl .json, else text). "
        "pairs: csv or jsonl with an input and an output; nq: Natural Questions; squad: SQuAD json; dummy: made up.",
    )
    name: str = Field("", description="Name of this source in the ledger; the path when silent.")
    document: Literal["file", "line", "paragraph"] = Field(
        "file", description="text: what one document is: a file, a line, or what blank lines separate."
    )
    encoding: str = Field("auto", description="Encoding of the files: auto, utf-8, windows-1251, koi8-r, cp866 …")
    field: str = Field("text", description="jsonl: the field that holds the text.")
    profile: Literal["none", "lib.ru"] = Field(
        "none", description="html: drop the header and footer of a known site; a page without its marks is kept whole."
    )
    pairs: Literal["none", "commas"] = Field(
        "none", description="Make pairs of plain texts: commas (input is the text without its commas, output the text)."
    )
    input: str = Field("input", description="pairs: the column or field of the input.")
    output: str = Field("output", description="pairs: the column or field of the output.")
    outputs: str = Field("", description="pairs: the file that holds the outputs, line for line, when it is another.")
    kind: Literal["text", "questions"] = Field("text", description="dummy: what to make.")
    documents: Count = Field(1000, ge=1, description="dummy: how many documents to make.")
    seed: Count = Field(0, description="dummy: the seed that the documents are made from.")

    @property
    def yields(self) -> Literal["text", "pairs", "questions"]:
        """What the records of this source are."""
        if self.format in ("nq", "squad") or (self.format == "dummy" and self.kind == "questions"):
            return "questions"
        return "pairs" if self.format == "pairs" or self.pairs != "none" else "text"

    @model_validator(mode="after")
    def _needs_path(self) -> SourceConfig:
        if self.format != "dummy" and not self.path:
            raise ValueError("a source needs a path (or format: dummy); write path: texts/*.txt")
        return self


class CleanConfig(Section):
    unicode: Literal["NFC", "NFKC", "none"] = Field("NFC", description="Unicode normal form.")
    control: bool = Field(True, description="Remove control characters other than line feed and tab.")
    whitespace: bool = Field(
        True, description="CRLF to LF, trailing spaces off each line, at most two blank lines in a row, ends stripped."
    )
    minimum: Count = Field(1, ge=1, description="Documents of fewer characters than this are dropped (too_short).")


class DedupConfig(Section):
    exact: bool = Field(True, description="Keep the first of documents with the same cleaned text.")


class DataConfig(Section):
    sources: list[SourceConfig] = Field(default=[], description="Where the text comes from; one source or many.")
    clean: CleanConfig = Field(
        CleanConfig(),
        description="Cleaning rules; each counted in the ledger. Questions and their documents are taken as they are: "
        "answers are located in them by character.",
    )
    dedup: DedupConfig = Field(DedupConfig(), description="Which repeated documents are dropped.")
    validation: Annotated[float | str, BeforeValidator(_number_if_it_is_one)] = Field(
        0.05,
        description="Fraction of documents held out for validation, chosen by hash; or a path to validation texts.",
    )
    block: Count = Field(
        1024, ge=2, description="Tokens in a block; the longest window or pair where samples stand alone."
    )
    max_bad: Number = Field(0.001, ge=0, le=1, description="Share of unreadable records that is borne; each is listed.")
    max_document: Bytes = Field(
        100_000_000, ge=1, description="Largest file or line read as one document, in bytes; a larger one is an error."
    )
    store: str = Field(
        "", description="Folder for token stores; by default in the cache folder (ARTEL_CACHE).",
        json_schema_extra={"shapes_result": False},
    )  # fmt: skip

    @field_validator("validation")
    @classmethod
    def _fraction(cls, value: float | str) -> float | str:
        if isinstance(value, float) and not 0 <= value < 1:
            raise ValueError(f"{value} is not a fraction from 0 to below 1, nor a path; write 0.05")
        return value


class TokenizerTraining(Section):
    vocab: Count = Field(16384, ge=257, description="Ids in the vocabulary, the special tokens included.")
    end: str | None = Field(
        None, min_length=1, description="The end-of-document token; <|endoftext|>, for encoders </s>, when null."
    )
    pad: str | None = Field(
        None, min_length=1, description="The padding token; <|pad|>, for encoders <pad>, when null."
    )
    special: list[str] = Field(default=[], description="Further special tokens.")
    minimum_frequency: Count = Field(2, ge=1, description="Merges seen fewer times than this are not made.")
    sample: Bytes = Field(
        2_000_000_000, ge=1, description="Bytes of training text, at most, that the tokenizer is trained on."
    )


class TokenizerConfig(Section):
    train: TokenizerTraining | None = Field(None, description="Train a byte-level BPE on the training text.")
    from_: str | None = Field(None, alias="from", description="Folder or hub id of an existing tokenizer.")

    @model_validator(mode="after")
    def _one(self) -> TokenizerConfig:
        if self.train is not None and self.from_ is not None:
            raise ValueError("both train and from are given; keep one")
        return self


class ModelConfig(Section):
    config: dict[str, Any] | None = Field(
        None, description="From scratch: model_type and any key of its transformers configuration."
    )
    from_: str | None = Field(None, alias="from", description="Pretrained: a folder or a hub id.")

    @model_validator(mode="after")
    def _one(self) -> ModelConfig:
        if self.config is not None and self.from_ is not None:
            raise ValueError("both config and from are given; keep one")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config has no model_type; write model_type: gpt2 (or llama, qwen3 …)")
        return self


class MaskedConfig(Section):
    rate: Number = Field(0.15, gt=0, lt=1, description="Share of tokens that are predicted.")
    mask: Number = Field(0.8, ge=0, le=1, description="Of these, the share replaced by the mask token.")
    random: Number = Field(0.1, ge=0, le=1, description="And by any token; the rest stay as they are.")
    whole_words: bool = Field(False, description="Choose words, all of whose tokens are predicted, not tokens.")

    @model_validator(mode="after")
    def _shares(self) -> MaskedConfig:
        if self.mask + self.random > 1:
            raise ValueError(f"mask {self.mask:g} and random {self.random:g} are over 1 together; write 0.8 and 0.1")
        return self


class HeadWeights(Section):
    start: Number = Field(1.0, ge=0, description="Cross-entropy of the first token of the answer.")
    end: Number = Field(1.0, ge=0, description="And of the last.")
    start_position: Number = Field(
        1.0, ge=0, description="five: squared error of the start's place in the window, 0 to 1."
    )
    end_position: Number = Field(1.0, ge=0, description="five: and of the end's.")
    answer_class: Number = Field(1.0, ge=0, description="five: loss of the class: yes, no, short, long, unknown.")


class SpanQAConfig(Section):
    question: Count = Field(64, ge=1, description="Longest question in tokens; a longer one is rejected and listed.")
    stride: Count = Field(128, ge=1, description="Tokens from one window of a document to the next.")
    unknown_windows: Number = Field(
        1.0, ge=0, le=1, description="Share of training windows without the answer that is kept; 0.02 suits NQ."
    )
    heads: Literal["span", "five"] = Field(
        "span", description="span: start and end (SQuAD); five: also their regression and the answer's class (NQ)."
    )
    weights: HeadWeights = Field(HeadWeights(), description="What each head's loss counts.")
    class_loss: Literal["cross_entropy", "focal", "smooth"] = Field(
        "cross_entropy", description="five: the class head's loss; focal is Lin et al. 2017, smooth is label smoothing."
    )
    focal_gamma: Number = Field(2.0, ge=0, description="focal: how much sure answers count less.")
    focal_alpha: Number = Field(1.0, gt=0, description="focal: factor of the loss.")
    smoothing: Number = Field(0.1, ge=0, lt=1, description="smooth: probability shared among all classes.")
    class_weights: Literal["none", "balanced"] = Field(
        "none", description="five: balanced weighs each class by the inverse of its share of the training windows."
    )
    balanced_sampling: bool = Field(
        False, description="Draw windows of each class equally often, rare ones repeatedly; an epoch stays as long."
    )
    no_answer: bool = Field(True, description="A document may hold no answer (SQuAD v2, NQ); false for SQuAD v1.")
    longest_answer: Count = Field(30, ge=1, description="Longest predicted answer in tokens.")


class TrainConfig(Section):
    epochs: Number | None = Field(
        None, gt=0, description="Length of the run in epochs (1 when none of three is given)."
    )
    steps: Count | None = Field(None, ge=1, description="Length of the run in steps.")
    tokens: Count | None = Field(None, ge=1, description="Length of the run in tokens.")
    batch: Count = Field(64, ge=1, description="Blocks in a global batch: what one optimizer step sees.")
    micro_batch: Literal["auto"] | Count = _free(
        "auto", "Blocks that one process runs at a time; gradients are accumulated over the rest of its share."
    )
    optimizer: Literal["adamw", "muon", "sgd"] = Field(
        "adamw", description="adamw; muon (matrices of the layers; adamw for the rest); sgd."
    )
    learning_rate: Number = Field(5e-5, gt=0, description="Peak learning rate.")
    muon_learning_rate: Number = Field(0.02, gt=0, description="muon: peak learning rate of the layers' matrices.")
    betas: list[Number] = Field(
        [0.9, 0.95], min_length=2, max_length=2, description="adamw: decay of its two averages."
    )
    epsilon: Number = Field(1e-8, gt=0, description="adamw: added to the denominator.")
    momentum: Number = Field(0.0, ge=0, lt=1, description="sgd: momentum.")
    weight_decay: Number = Field(0.1, ge=0, description="Decoupled weight decay; never on biases and norms.")
    schedule: Literal["linear", "cosine", "constant", "wsd"] = Field(
        "cosine", description="Learning rate after warmup; wsd is warmup, stable, then a linear decay."
    )
    warmup: Warmup = Field(Warmup(fraction=0.01), description="Steps, or a fraction of the run when below 1.")
    decay: Number = Field(0.2, gt=0, le=1, description="wsd: fraction of the run that decays at its end.")
    minimum_learning_rate: Number = Field(
        0.0, ge=0, le=1, description="Floor of the schedule as a fraction of the peak."
    )
    clip: Number | None = Field(1.0, gt=0, description="Largest gradient norm; null for no clipping.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="auto: bf16 where the device multiplies it natively, else fp32. Weights stay fp32."
    )
    compile: Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_or_off)] = Field(
        "auto", description="torch.compile of each layer."
    )
    threads: Count | None = _free(None, "CPU threads of each process; auto when null.", ge=1)

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        given = [name for name in ("epochs", "steps", "tokens") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given together; keep one")
        return self


class ValidateConfig(Section):
    every: Interval = _free(Interval(epochs=1), "How often: 500 (steps), 1 epoch, 30min, never. The end always counts.")
    blocks: Count | None = _free(None, "At most this many validation blocks; all when null.", ge=1)
    prompts: list[str] = _free(
        [], "Texts that the model continues (masked: whose masks it fills) at each validation; kept in samples.jsonl."
    )
    new_tokens: Count = _free(60, "Tokens written for each prompt.", ge=1)
    patience: Count | None = Field(
        None,
        ge=1,
        description="Stop after so many validations without a better checkpoint.best; RUN/model is the best.",
    )


class ParallelConfig(Section):
    data: Literal["auto"] | Count = _free(
        "auto", "Processes that share each global batch, started by artel train on its hosts; auto takes all that run."
    )


class CheckpointConfig(Section):
    every: Interval = _free(
        Interval(seconds=1800), "How often: 1500 (steps), 1 epoch, 30min, never. The end always counts."
    )
    keep: Count = _free(3, "How many of the newest are kept, beside the best.", ge=1)
    best: str | None = _free("loss", "The validation figure that `best` goes by, any of the objective's; null: none.")


class LogConfig(Section):
    every: Count = _free(10, "Steps between two lines of metrics.jsonl.", ge=1)


class RunConfig(Section):
    run: str = _free("", "Folder of this run: everything it writes goes here. runs/NAME-OF-RUN-FILE when silent.")
    seed: Count = Field(42, ge=0, description="Fixes order, initial weights and dropout.")
    data: DataConfig = Field(DataConfig(), description="The text: sources, cleaning, split, blocks.")
    tokenizer: TokenizerConfig = Field(
        TokenizerConfig(), description="Trained or taken; when silent, that of model.from, or one of 16384 is trained."
    )
    model: ModelConfig = Field(ModelConfig(), description="From scratch or pretrained; when silent, a GPT-2.")
    objective: Literal["causal", "masked", "span_qa"] = Field(
        "causal", description="What is learned: the next token, masked tokens (or pairs), answers within documents."
    )
    masked: MaskedConfig = Field(MaskedConfig(), description="objective masked: what is hidden.")
    span_qa: SpanQAConfig = Field(SpanQAConfig(), description="objective span_qa: windows, heads, losses, prediction.")
    train: TrainConfig = Field(TrainConfig(), description="Length, batch, optimizer, schedule, precision.")
    validate_: ValidateConfig = Field(
        ValidateConfig(), alias="validate", description="When and how the model is judged."
    )
    parallel: ParallelConfig = Field(ParallelConfig(), description="How the run is spread over processes.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="When the run is saved and what is kept.")
    log: LogConfig = Field(LogConfig(), description="How often figures are written down.")
    track: list[Literal["console", "jsonl", "tensorboard", "wandb"]] = _free(
        ["console", "jsonl"], "Where figures go; tensorboard and wandb are extras."
    )
