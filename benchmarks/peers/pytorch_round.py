"""A round of any method in plain PyTorch: its time, and the floating-point operations that it cannot do without.

The count is PyTorch's own (``FlopCounterMode``): the matrix products and convolutions, forward and backward, that one
client and the server really run, the client's times the number of clients, which are alike. While it counts, features
of a frozen extractor are computed once per phase and not in every epoch, since that is what must be done.
"""

import torch
from case import measure, parser, read, save
from pytorch_methods import METHODS
from torch.utils.flop_counter import FlopCounterMode


def main() -> None:
    """Times some rounds, and counts the operations of one where asked."""
    options = parser()
    options.add_argument("--without-loader", action="store_true", help="mini-batches are slices of the tensors")
    options.add_argument("--count", action="store_true", help="count floating-point operations, too")
    arguments = options.parse_args()
    case = read(arguments.case)
    torch.manual_seed(0)
    method, on_gpu = case.settings["method"], torch.cuda.is_available()
    if on_gpu and method != "fedavg":
        raise SystemExit(f"{method}: on a GPU the loop has been written for FedAvg alone")
    if on_gpu:  # as ours there (`run.precision`); PyTorch's convolutions have tensorfloat32 without being asked
        torch.set_float32_matmul_precision("high")
    loop = METHODS[method](case, loader=not arguments.without_loader, device="cuda" if on_gpu else "cpu")

    def round_(warm_up: bool) -> None:
        loop.round(warm_up)
        if on_gpu:
            torch.cuda.synchronize()

    def model() -> list:
        return [parameter.detach().cpu().numpy().copy() for parameter in loop.server.parameters()]

    result = measure(round_, arguments.rounds, model)
    flops = 0.0
    if arguments.count:
        with FlopCounterMode(display=False) as counter:
            loop.one_client()
        flops += counter.get_total_flops() * len(loop.clients)
        with FlopCounterMode(display=False) as counter:
            loop.aggregate(loop.uploads)
        flops += counter.get_total_flops()
    save(arguments.out, result["seconds"], flops, result["first"])


if __name__ == "__main__":
    main()
