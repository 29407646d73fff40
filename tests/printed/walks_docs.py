"""The commands of docs/ and of the demo; how to read the table: walks.py."""

from __future__ import annotations

from printed import inputs
from printed.walks import SMALL_GPT2, Step, Walk

_GPT2 = "model.config.model_type=gpt2"  # instead of one that artel chooses
_UPLOADS = "it uploads; tests/test_push.py does, to a hub on this machine"
_SERVED = "it serves until Ctrl-C; tests/test_serve_clients.py asks a server that runs"
_BENCH = "--steps 1 --rounds 1 --batch 1 --length 16 --time-limit 1"

_SHELF = "data.sources.0.document=line train.epochs=null train.steps=2 data.block=32"

DOCS = (
    Walk(
        "docs/extending.md",
        (
            Step(
                "artel launch background run.yaml",
                instead="artel config check run.yaml",
                why="it needs the plugin of the page; tests/test_extending.py launches with it",
            ),
        ),
        needs=(inputs.run_yaml(),),
    ),
    Walk(
        "docs/further.md",
        (
            Step(
                "artel train tolstoy-finetune 'data.sources.0.path=books/*.txt' model.from=FOLDER run=runs/books",
                _SHELF,
                leaves="runs/books/model",
            ),
            Step('artel generate runs/books --prompt "Все счастливые семьи" --max-new-tokens 150'),
            Step(
                "artel train tolstoy-finetune 'data.sources.0.path=more/*.txt' model.from=runs/books/model "
                "run=runs/more",
                _SHELF,
                leaves="runs/more/model",
            ),
            Step(
                "artel train tolstoy-finetune 'data.sources.0.path=books/*.txt' model.from=FOLDER model.lora.rank=16 "
                "run=runs/books-lora",
                _SHELF,
                leaves="runs/books-lora/model",
            ),
        ),
        needs=(inputs.novel("books/novel.txt"), inputs.novel("more/novel.txt"), inputs.gpt2()),
    ),
    Walk(
        "docs/run-folder.md",
        (Step("artel clean", says="in total"), Step("artel clean downloads faults", says="removed")),
    ),
    Walk(
        "docs/sweep.md",
        (
            Step(
                "for rate in 1e-4 3e-4 1e-3; do artel train run.yaml run=runs/rate-$rate train.learning_rate=$rate; "
                "done",
                instead="artel train run.yaml run=runs/rate-1e-4 train.learning_rate=1e-4",
                why="a test starts one command at a time; the others of the loop run before",
            ),
            Step("artel report runs/rate-1e-4 runs/rate-3e-4 runs/rate-1e-3", says="rate-3e-4"),
        ),
        before=tuple(
            f"artel train run.yaml run=runs/rate-{rate} train.learning_rate={rate}" for rate in ("3e-4", "1e-3")
        ),
        needs=(inputs.run_yaml(),),
    ),
    Walk(
        "docs/rented-gpu.md",
        (
            Step("artel plan run.yaml --hardware rtx-4090 --price 0.4", says="costs"),
            Step("artel plan run.yaml --fit"),
            Step("artel prepare run.yaml data.store=stores", leaves="stores"),
            Step("artel train run.yaml data.store=stores", leaves="runs/run/model"),
        ),
        needs=(inputs.run_yaml(),),
    ),
    Walk(
        "docs/checkpoints.md",
        (
            Step("artel train run.yaml run=runs/evening train.budget=30min", "train.budget=60s", says="steps are done"),
            Step(
                "artel train run.yaml train.schedule=constant train.steps=60", "train.steps=2", says="2 steps are done"
            ),
            Step(
                "artel train run.yaml train.schedule=constant train.steps=120", "train.steps=3", says="3 steps are done"
            ),
        ),
        needs=(inputs.run_yaml(),),
    ),
    Walk(
        "docs/report.md",
        (
            Step("artel report runs/tolstoy", says="loss"),
            Step("artel report runs/tolstoy runs/llama", says="tokens/s"),
            Step("artel watch runs/tolstoy", says="complete"),
            Step("artel report runs/tolstoy --html report.html", leaves="report.html"),
            Step("artel report runs/tolstoy runs/llama --html report.html --language ru", leaves="report.html"),
            Step(
                "artel report runs/tolstoy --live",
                instead="artel report --help",
                why="it is served until Ctrl-C; tests/test_report_browser.py opens it while a run trains and dies",
            ),
            Step("artel report runs/tolstoy --html report.html --language ru", leaves="report.html"),
        ),
        before=("artel train run.yaml run=runs/tolstoy", "artel train run.yaml run=runs/llama"),
        needs=(inputs.run_yaml(),),
    ),
    Walk(
        "docs/push.md",
        (
            Step("artel push runs/tolstoy me/tolstoy --dry-run card", leaves="card/README.md"),
            Step(
                "artel push runs/tolstoy me/tolstoy --license apache-2.0 --language ru",
                instead="artel push runs/tolstoy me/tolstoy --license apache-2.0 --language ru --dry-run licensed",
                why=_UPLOADS,
                leaves="licensed/model.safetensors",
            ),
            Step(
                "artel push runs/chat-lora me/assistant --base-model me/base",
                instead="artel push runs/chat-lora me/assistant --base-model me/base --dry-run adapter",
                why=_UPLOADS,
                leaves="adapter/adapter_config.json",
            ),
            Step(
                "artel push runs/tolstoy me/tolstoy --step 1500",
                instead="artel push runs/tolstoy me/tolstoy --step 2 --dry-run step",
                why=_UPLOADS,
                leaves="step/model.safetensors",
            ),
            Step(
                "artel push runs/tolstoy me/tolstoy --step best --revision best",
                instead="artel push runs/tolstoy me/tolstoy --step best --revision best --dry-run best",
                why=_UPLOADS,
                leaves="best/model.safetensors",
            ),
        ),
        before=(
            "artel train run.yaml run=runs/tolstoy",
            "artel train run.yaml run=runs/chat-lora model.config=null model.from=runs/tolstoy/model "
            "model.lora.rank=4 tokenizer.train=null",
        ),
        needs=(inputs.run_yaml(),),
    ),
    Walk(
        "docs/serve.md",
        (
            Step("pip install 'artel-lm[serve]'", "--dry-run --no-index", says="Requirement already satisfied"),
            Step("artel serve runs/chat-lora", instead="artel serve --help", why=_SERVED),
            Step(
                "artel serve FOLDER --port 9000 --api-key KEY --host 0.0.0.0", instead="artel serve --help", why=_SERVED
            ),
        ),
    ),
    Walk(
        "docs/text.md",
        (
            Step("artel data show run.yaml", says="sample 0"),
            Step("artel data import corpus.bin STORE --tokenizer FOLDER", leaves="STORE/manifest.json"),
            Step("artel config explain data", says="data.sources.0.path"),
            Step(
                "artel data classifier good.txt bad.txt classifiers/prose", leaves="classifiers/prose/classifier.json"
            ),
            Step("artel data show STORE --document 7", says="sample 7"),
            Step("artel data verify STORE", says="whole"),
        ),
        needs=(inputs.gpt2(), inputs.token_file, inputs.run_yaml(), inputs.good_and_bad),
    ),
    Walk(
        "docs/python.md",
        (Step("artel config schema > run.schema.json", leaves="run.schema.json"),),
    ),
    Walk(
        "docs/convert.md",
        (
            Step("artel config convert axolotl.yml > run.yaml", leaves="run.yaml"),
            Step("artel config convert train.sh > run.yaml", leaves="run.yaml"),
        ),
        needs=(inputs.conversations, inputs.chat_model(), inputs.axolotl, inputs.run_clm),
    ),
    Walk(
        "docs/clusters.md",
        (
            Step("pip install 'artel-lm[cluster]'", "--dry-run --no-index", says="Requirement already satisfied"),
            Step(
                "ray start --head",
                instead="artel config check run.yaml prepare.engine=ray",
                why="Ray listens on all interfaces; tests/test_cluster.py starts it in a network of its own",
            ),
            Step(
                "ray start --address=THAT_MACHINE:6379",
                instead="artel config check run.yaml prepare.engine=ray",
                why="several machines",
            ),
            Step(
                "RAY_ADDRESS=THAT_MACHINE:6379 artel prepare run.yaml prepare.engine=ray",
                instead="artel config check run.yaml prepare.engine=ray",
                why="several machines",
            ),
            Step("ray start", instead="ray start --help", why="a part of the two above"),
            Step("sbatch --mem=40G --wrap 'artel prepare run.yaml'", instead="artel prepare run.yaml", why="Slurm"),
        ),
        needs=(inputs.run_yaml(),),
    ),
    Walk(
        "docs/launching.md",
        (
            Step("artel train run.yaml --nproc 8", "--nproc 2 run=runs/eight", leaves="runs/eight/model"),
            Step(
                "artel train run.yaml --nproc 8 --nnodes 2 --rdzv-endpoint node1:29500",
                "--nnodes 1 --nproc 1 --rdzv-endpoint 127.0.0.1:{port} run=runs/two",
                leaves="runs/two/model",
            ),
            Step("accelerate launch -m artel train run.yaml", "run=runs/accelerate", leaves="runs/accelerate/model"),
            Step(
                "mpirun -np 8 artel train run.yaml",
                instead="artel config check run.yaml",
                why="an MPI; tests/test_launch_environment.py sets the variables that it does",
            ),
            Step(
                "artel launch kubernetes run.yaml --nodes 2 --gpus 8 --image example.org/artel:gpu",
                "--dry-run",
                says="kind: JobSet",
            ),
            Step("artel launch skypilot run.yaml --gpus 8 --accelerator H100", "--dry-run", says="H100:8"),
            Step(
                "artel launch hf-jobs run.yaml --image example.org/artel:gpu", "--dry-run", says='"flavor": "cpu-basic"'
            ),
            Step("artel launch slurm run.yaml --nodes 2 --gpus 8 --time 12:00:00", "--dry-run", says="#SBATCH"),
            Step(
                "srun artel train run.yaml",
                instead="artel config check run.yaml",
                why="Slurm; tests/test_launch_slurm.py has two nodes of it",
            ),
            Step("accelerate config", instead="accelerate config --help", why="asks questions at a terminal"),
            Step(
                "artel launch kubernetes run.yaml --nodes 2 --gpus 8 --image example.org/artel:gpu --dry-run",
                says="parallelism: 2",
            ),
            *(
                Step(
                    f"artel launch {words}",
                    instead="artel launch status run.yaml",
                    status=2,
                    says="has no job",
                    why="no job was submitted; tests/test_launch_kubernetes.py submits one and follows it",
                )
                for words in ("status runs/run", "logs runs/run --follow", "cancel runs/run")
            ),
            Step(
                "artel launch slurm run.yaml --cpus 64 --dry-run -- prepare run.yaml",
                says="-m artel prepare run.yaml",
            ),
            Step(
                "kubectl create secret generic artel --from-literal=HF_TOKEN=$HF_TOKEN",
                instead="artel config check run.yaml",
                why="it needs a cluster",
            ),
            Step(
                "artel launch hf-jobs run.yaml --image example.org/artel:gpu --mount hf://buckets/me/runs=/data "
                "--flavor a10g-small --time 2h --dry-run",
                says='"timeout": 7200',
            ),
            Step(
                "artel launch skypilot run.yaml --gpus 8 --accelerator H100 --mount shared=/data --dry-run",
                says="use_spot: true",
            ),
            Step(
                "artel launch slurm run.yaml --nodes 2 --gpus 8 --cpus 64 --time 12:00:00 --partition gpu --dry-run",
                says="#SBATCH --partition=gpu",
            ),
            Step(
                "srun --ntasks-per-node=1 artel train run.yaml --nproc 8",
                instead="artel config check run.yaml",
                why="Slurm",
            ),
        ),
        needs=(inputs.run_yaml(),),
    ),
    Walk(
        "docs/plan.md",
        (
            Step("artel plan run.yaml --hardware h100-80gb:8 --nodes 4 parallel.data=fsdp", says="32 × h100-80gb"),
            Step("artel plan run.yaml --hardware h100-80gb:8 --price 2.49", says="costs"),
            Step("artel plan run.yaml --hardware h100-80gb:8 --fit", says="advice: the fastest that fit 8 × h100-80gb"),
            Step(
                "artel plan run.yaml --hardware v100-32gb:1 --host-memory 1.5TB parallel.deepspeed=ds_config.json",
                says="on the first host to save",
            ),
            Step(
                "python benchmarks/plan.py",
                instead="python {clone}/benchmarks/plan.py --only 'roberta, one process'",
                why="its 26 cases take an hour",
                says="error",
            ),
            Step(
                "python benchmarks/plan_published.py",
                instead="python {clone}/benchmarks/plan_published.py --help",
                why="its plans take two minutes",
            ),
            Step(
                "python benchmarks/plan_gpu.py",
                instead="python {clone}/benchmarks/plan_gpu.py --help",
                why="it trains on a GPU",
            ),
            Step(
                "artel plan pile-235b --hardware a100-80gb:8 --host-memory 1TB",
                says="of the host memory, 931.3 GiB on each host",
                status=1,
            ),
            Step("artel plan pile-125m --hardware v100-16gb", says="fits: "),
        ),
        needs=(inputs.run_yaml(), inputs.ds_config),
        long=True,
    ),
    Walk(
        "docs/parallel.md",
        (
            Step(
                "artel train run.yaml parallel.pipeline=4 parallel.schedule=zero_bubble",
                "parallel.pipeline=2 run=runs/stages",
                leaves="runs/stages/model",
            ),
            Step("artel doctor run.yaml --parallel --nproc 4", "--nproc 2"),
        ),
        needs=(inputs.run_yaml(),),
    ),
    Walk(
        "DeepSpeed",
        (
            Step(
                "deepspeed --num_gpus=8 --module artel train run.yaml --deepspeed ds_config.json",
                instead="deepspeed --num_gpus=2 --master_port={port} --module artel train run.yaml --deepspeed "
                "ds_config.json run=runs/launcher",
                why="eight GPUs",
                leaves="runs/launcher/model",
            ),
            Step(
                "artel train run.yaml --nproc 8 --deepspeed ds_config.json",
                "--nproc 2 run=runs/zero",
                leaves="runs/zero/model",
            ),
            Step("artel export checkpoint-500 FOLDER", leaves="FOLDER/model.safetensors"),
            Step(
                "artel train run.yaml --from-deepspeed checkpoint-500",
                "run=runs/goes-on",
                leaves="runs/goes-on/model",
            ),
            Step("artel export RUN UNIVERSAL --deepspeed", leaves="UNIVERSAL/latest_universal"),
        ),
        needs=(inputs.run_yaml(), inputs.ds_config),
        before=(
            "artel train run.yaml run=RUN",
            "python {clone}/tests/printed/checkpoint_500.py RUN/model",
        ),
        deepspeed=True,
        long=True,
    ),
    Walk(
        "measuring",
        (
            Step(
                "python benchmarks/prepare_speed.py --only end_to_end,near --size 100M --rounds 1 --workers 2",
                instead="python {clone}/benchmarks/prepare_speed.py --only end_to_end,near --size 1M --rounds 1",
                why="from the clone; briefly",
                says="MB/s",
            ),
            Step(
                "python benchmarks/prepare_kills.py",
                instead="python {clone}/benchmarks/prepare_kills.py --moments 1 --workers 1",
                why="from the clone; kills at 60 moments take a quarter of an hour",
            ),
            Step(
                "python benchmarks/prepare_speed.py",
                instead="python {clone}/benchmarks/prepare_speed.py --only jsonl_zst --size 1M --rounds 1 --workers 1",
                why="from the clone; briefly",
                says="MB/s",
            ),
            Step(
                "python benchmarks/prepare_speed.py --only end_to_end --peer benchmarks/peers/run_clm.py",
                instead="python {clone}/benchmarks/prepare_speed.py --only html --size 1M --rounds 1",
                why="from the clone; end_to_end runs datasets, which the tests do not install",
                says="MB/s",
            ),
        ),
        long=True,
    ),
    Walk(
        "docs/speed.md",
        (
            Step(
                "python benchmarks/train_speed.py",
                instead=f"python {{clone}}/benchmarks/train_speed.py {_BENCH}",
                why="from the clone; briefly",
                says="tokens/s",
            ),
            Step(
                "python benchmarks/train_speed.py --peer benchmarks/peers/trainer.py:default "
                "--peer benchmarks/peers/trainer.py:tuned",
                instead="python {clone}/benchmarks/train_speed.py --peer {clone}/benchmarks/peers/trainer.py:default "
                f"--peer {{clone}}/benchmarks/peers/trainer.py:tuned {_BENCH}",
                why="from the clone; briefly",
                says="trainer.py:tuned",
            ),
            Step("artel doctor", says="torch"),
        ),
        long=True,
    ),
    Walk(
        "docs/hardware.md",
        (
            Step("artel hardware", says="GFLOP/s"),
            Step(
                "python benchmarks/plan_speed.py",
                instead="python {clone}/benchmarks/plan_speed.py --help",
                why="from the clone; takes many minutes",
            ),
        ),
        long=True,
    ),
    Walk(
        "CONTRIBUTING.md",
        (
            Step(
                "pytest tests/test_loss.py -n 0",
                instead="pytest {clone}/tests/test_loss.py --collect-only -q -n 0",
                why="no test runs tests",
                says="test_loss.py",
            ),
            Step(
                "bash scripts/check_wheel.sh",
                instead="bash -n {clone}/scripts/check_wheel.sh",
                why="builds and installs from a package index",
            ),
        ),
    ),
    Walk(
        "the clone",
        (
            Step(
                "python benchmarks/parity.py",
                instead="python {clone}/benchmarks/parity.py --help",
                why="from the clone; takes many minutes; tests/test_parity.py has a part of it",
            ),
            Step(
                "python benchmarks/architectures.py",
                instead="python {clone}/benchmarks/architectures.py --help",
                why="from the clone; takes many minutes; tests/test_architectures_table.py has a part of it",
            ),
            Step(
                "python benchmarks/architectures.py --heads images",
                instead="python {clone}/benchmarks/architectures.py --help",
                why="from the clone; takes many minutes; tests/test_architectures_table.py has a part of it",
            ),
            Step("artel config explain", says="data.sources"),
        ),
    ),
    Walk(
        "scripts/demo.sh",
        (
            Step(
                "artel train demo-ru --restart --json > runs/demo-ru.json",
                f"{_GPT2} {SMALL_GPT2}",
                leaves="runs/demo-ru/model",
            ),
            Step("artel report runs/demo-ru --compressor", says="xz"),
            Step('artel generate runs/demo-ru --prompt "Раскольников" --max-new-tokens 120', says="Раскольников"),
            Step("artel report runs/demo-ru --html runs/demo-ru.html --language ru", leaves="runs/demo-ru.html"),
            Step(
                "artel train demo --restart --json > runs/demo.json", f"{_GPT2} {SMALL_GPT2}", leaves="runs/demo/model"
            ),
            Step("artel report runs/demo --compressor", says="xz"),
            Step('artel generate runs/demo --prompt "The whale" --max-new-tokens 120', says="The whale"),
            Step("artel report runs/demo --html runs/demo.html", leaves="runs/demo.html"),
        ),
        needs=(lambda folder: (folder / "runs").mkdir(),),
    ),
)
