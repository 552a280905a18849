"""The examples at the end of each command's help; a test parses every line."""

#: Of ``capszoo --help``, then of the commands in the order of its panels.
_ROOT = """
capszoo predict resnet20_routingcaps digit.png    # classify an image
capszoo explain heatmap resnet20_routingcaps digit.png
capszoo finetune idpa_resnet.cifar10 --data photos
"""
_COMMANDS = """
capszoo list                       # every architecture with its weights
capszoo list mnist --pretrained    # checkpoints whose name has 'mnist'
capszoo info resnet20_routingcaps
capszoo info idpa_resnet --img-size 64 --json
capszoo predict resnet20_routingcaps digit.png photos/
capszoo predict resnet20_routingcaps drawing.png --invert --fit
capszoo predict idpa_resnet.cifar10 photos/ --out answers.csv
capszoo predict idpa_resnet.cifar10 photos/ --ray local --out answers.parquet
capszoo predict resnet20_routingcaps digit.png --runtime onnx    # later calls start without PyTorch
capszoo explain heatmap resnet20_routingcaps digit.png --out heat.pdf --style paper
capszoo explain perturb capsnet_dynamic.mnist digit.png --dims 0,3,5
capszoo explain reconstruct capsnet_dynamic.mnist --data FOLDER
capszoo explain multi resnet20_routingcaps.multimnist --data FOLDER
capszoo app
capszoo app capsnet_dynamic.mnist resnet20_routingcaps.mnist --browser
capszoo serve resnet20_routingcaps.mnist
capszoo serve runs/photos --port 8080 --queue 16
capszoo eval resnet20_routingcaps.mnist --data FOLDER
capszoo eval runs/photos --data photos --split val
capszoo eval idpa_resnet.cifar10 --data FOLDER --robustness --limit 1000 --out report
capszoo eval resnet20_em.cifar10 --data FOLDER --pose --deletion --ood cifar100 --limit 1000
capszoo compare resnet20_routingcaps.mnist idpa_cnn.mnist
capszoo compare resnet20_routingcaps.mnist idpa_cnn.mnist --data FOLDER --limit 2000
capszoo export resnet20_routingcaps --out digits.onnx    # the file alone
capszoo export resnet20_routingcaps --out digits         # a folder with infer.py, labels, checksums
capszoo export idpa_resnet.cifar10 --out served --precision fp16 --triton
capszoo check digits
capszoo benchmark idpa_resnet --batch-size 1,32
capszoo benchmark digits photos/ --runtimes eager,onnxruntime    # a bundle, on real images
capszoo finetune idpa_resnet.cifar10 --data photos
capszoo finetune --backbone resnet18.a1_in1k --head idpa --data photos --epochs 20
capszoo finetune resnet20_routingcaps.mnist --data photos --folds 5 --log-with wandb
capszoo train resnet20_routingcaps.mnist --data FOLDER
capszoo train resnet20_routingcaps.mnist --epochs 2 --dry-run    # settings and estimated time
capszoo train my.yaml --set optimizer.lr=0.001 --seeds 0,1,2
capszoo recipes list mnist
capszoo recipes show idpa_cnn.mnist --set epochs=20
capszoo recipes copy idpa_cnn.mnist my.yaml
capszoo recipes validate my.yaml
capszoo curves runs/a runs/b --out curves.pdf
capszoo publish runs/photos USER/photos --dry-run
capszoo publish runs/photos USER/photos --private
capszoo publish capsnet_dynamic.mnist USER/digits --space --dry-run
capszoo data list
capszoo data fetch mnist --to data
capszoo data check mnist --data data
capszoo doctor
capszoo doctor --json
"""

#: Examples by the command's name; empty for those of ``capszoo`` itself. Indented, they are code in the site's page.
EXAMPLES: dict[str, str] = {}
for _text, _root in ((_ROOT, True), (_COMMANDS, False)):
    for _line in _text.strip().splitlines():
        _name = "" if _root else _line.split()[1]
        EXAMPLES[_name] = f"{EXAMPLES.get(_name, '')}\n        {_line}"
