"""Measured on an H200, or where it says so on an H100, in bfloat16, against the best of torch."""

from . import (
    Epilogue,
    Figures,
    GemmGemm,
    GemmReduce,
    HiddenGradient,
    Linear,
    LinearCrossEntropy,
    MaxSim,
    MoeFFN,
    Rows,
    TileCosts,
    WeightGradient,
)

# Launched, kernels took 31 to 41 µs at 14 to 15 million elements on an H100, eager torch 55 to 60. In training the host
# decides: it needed 110 to 610 µs.
_MAXIMUM: Rows = ((128, (3 * 2**22, 2**22)), (256, (2**26, 2**26)))
_MAXIMUM_GRADIENT: Rows = ((128, (2**27, 2**22)),)
_SUM_OF_SQUARES: Rows = ((128, (2**26, 2**23)), (256, (2**26, 2**26)))
# On an H100, replayed, 1.3 to 4.4 times as fast as torch at 22 sizes; launched, the host needs 25 to 40 µs.
_SUM: Rows = ((128, (2**24, 2**17)),)

FIGURES = Figures(
    ceilings={"NVIDIA H200": (790e12, 4.3e12), "NVIDIA H100 80GB HBM3": (790e12, 3.0e12)},
    gemm_gemm=GemmGemm(
        faster_from={
            ("ffn", False): ((64, (2**26, 2**22)), (128, (2**26, 2**25))),
            ("ffn", True): ((64, (2**27, 2**22)),),
            ("gated ffn", False): ((64, (3 * 2**24, 2**20)), (128, (3 * 2**24, 2**22)), (256, (45 * 2**20, 2**24))),
            ("gated ffn", True): ((64, (3 * 2**24, 2**20)),),
            # On an H100, replayed, 1.04 to 6.8 times as fast as torch from these on (0.85 at 15 × 448 × 1168 × 64 ×
            # 112), in training 1.1 to 3.9; launched 1.4 to 4, in training 1.1 to 2.4.
            ("gemm_gemm", False): ((128, (7 * 2**20, 2**22)),),
            ("gemm_gemm", True): ((64, (2**24, 2**23)),),
        },
        # An FFN costs the host as much as torch's launches or less, so that the device alone decides.
        sm90_faster_from={
            # Replayed, 0.97 to 2.0 times the best of torch's speed from these up to eight times as many elements.
            ("ffn", False): ((64, (2**20, 2**16)), (128, (2**21, 2**18)), (256, (2**23, 3 * 2**21))),
            ("ffn", True): ((64, (2**21, 2**16)), (128, (2**23, 5 * 2**18)), (256, (2**23, 7 * 2**20))),
            # At width 256 the path for wider layers, whose two launches took 0.53 to 1.03 of the time.
            ("gated ffn", False): ((64, (2**19, 2**15)), (128, (2**20, 2**18))),
            ("gated ffn", True): ((64, (2**19, 2**15)), (128, (2**23, 2**22)), (256, (3 * 2**21, 3 * 2**21))),
            # Launched, 1.26 to 2.8 times the best of torch's speed at ten random sizes of 7 to 24 million elements on
            # an H100, 0.67 to 1.26 at five of fewer.
            ("gemm_gemm", False): ((128, (7 * 2**20, 2**22)),),
            # On an H100, launched 1.05 to 1.9 times as fast as torch's operations at eleven sizes of 13 to 134 million
            # elements (0.92 at 4 million), replayed 1.2 to 2.4 times the best of torch's.
            ("gemm_gemm", True): ((64, (2**24, 3 * 2**22)), (128, (2**24, 2**24))),
        },
        # Launched one by one the host sets the pace: beside eager torch a training step took 0.89 to 1.13 of the time,
        # gated 0.65 to 1.1, in the median 0.98 and 0.82.
        trained_from={
            "ffn": ((64, (2**16, 2**16)), (128, (5 * 2**18, 5 * 2**18))),
            "gated ffn": ((64, (3 * 2**14, 3 * 2**14)), (128, (2**18, 2**18))),
        },
        busy_rows=2**13,
        # Few rows wait for the host, which needs 15 to 55 µs for torch's launches, gated 20 to 110, and 9 to 35 for a
        # kernel's. One tile of rows keeps the device busy for 14 to 18 µs up to these, gated for 27 to 42.
        weights_of_one_launch={False: 5 * 2**14, True: 2**18},
        # 37,712 × 256 × 2208 had 0.71 of torch.compile's speed, 65,536 × 256 × 768 has 1.22; with 720 units, which end
        # within a tile, a step took 1.12 to 1.96 of the time of the path for wider layers, with 1024 0.85 to 1.03.
        widest_of_many=128,
        # At 400 sizes on an H100, replayed, at 256 columns with less the path for wider layers took 0.24 to 1.06 of the
        # time (median 0.69), else 0.97 to 1.28 (1.1), with a second wave of hardly any tiles 0.85. At 345 sizes on an
        # H200 it took 0.44 to 1.28 (0.79) and 0.78 to 1.78 (1.13) up to 128 columns, and gated 0.97 to 1.8 from 2,048
        # rows on up to 64.
        least_filled={
            False: ((64, 0.3, 960), (128, 0.4, 512), (256, 0.7, 0)),
            True: ((64, 0.15, 960), (128, 0.4, 512), (256, 0.7, 0)),
        },
        # On an H100 0.22 to 0.83 of torch's speed below, but for one; 0.52 to 0.82 below the third at 72 to 100 tiles.
        # The first is between 0.83 at 5 × 256 × 3776 × 64 × 64 and 1.21 on an H200 at 4 × 1024 × 1024 × 64 × 128.
        least_tiles=(0.2, 0.45, 1),
        # On an H200 0.75 and 0.85 at 64 × 272 × 1280 × 88 × 88 and 32 × 288 × 1280 × 64 × 72, and 1.46 at 176 × 320 ×
        # 1792 × 88 × 80, whose tiles are as empty, but four for each SM.
        most_padding=1.75,
    ),
    epilogue=Epilogue(
        # Launched one by one, the host needs 0.4 to 0.5 ms for a forward and backward pass, eager torch 0.3 to 0.4.
        faster_from={
            (False, False): (3 * 2**31, 2**29),
            (False, True): (9 * 2**32, 2**30),
            (True, False): (2**29, 2**30),
            (True, True): (11 * 2**32, 2**30),
        },
        # With 256 tokens one kernel for the gradient was slower than torch at every width: too few tiles of 128 rows.
        least_rows=1024,
        # From 72 rows on, on an H100: torch's product and a kernel for what follows it took 0.60 to 0.95 of eager
        # torch's time for a training step, and a gated forward pass 0.38 to 0.91. Launched one by one a gated forward
        # pass is two launches, torch's are five: the host decides.
        recorded_from=2**18,
        few_rows=64,
        few_rows_weights=2**22,
        # At 33 sizes of 40 to 56 columns in a graph: 0.97 to 3.4 times eager torch's speed forward, 1.2 to 1.7 times
        # with the backward pass. From 64 to 328 columns 1.1 to 2.4 times the best of torch's speed forward; with the
        # backward pass 1.0 to 1.3 times, and of the smallest 0.88, where eager torch had 0.62 to 0.75.
        least_width=40,
        # On an H100, replayed. At 254 sizes rows of whole 16 bytes, and no more, cost the copies of tiles up to a third
        # of the time: a kernel had 0.68 to 1.0 of the speed of torch's products and what follows them, at 200 and 264
        # columns 1.0 to 1.4. At 211 others rows that start within 128 bytes did from 1800 columns on: torch's took 0.79
        # to 1.11 of a kernel's time (median 0.94), a training step 0.92 to 1.05 (107 sizes, 0.98).
        uneven_from={16: 600, 64: 1600},
        # 0.83 to 1.05, on an H200 0.90 to 0.95 at 18,080 × 1056 × 256, 15,856 × 1792 × 280 and 14,400 × 3072 × 320.
        few_units_width=896,
        # Of 247 sizes whose hidden units start so, too, a step with torch's product of the gradient took 0.92 to
        # 1.04 of the time from 1200 columns on, in the median 0.97; below that 0.94 to 1.1, and 1.02.
        uneven_gradient_from={16: 1200},
        # At 816 sizes on an H100, replayed: of up to 48 tiles a training step took 0.91 to 1.03 of the time of one
        # kernel's, of more 1.0 to 1.16, but of wide rows 0.92 to 1.02.
        few_tiles=(0.4, 3),
        wide_gradient_from=1536,
        # Without adapters one kernel had 1.0 to 1.5 times the best of torch's speed up to 656 columns, 0.83 to 0.95 at
        # 872 to 1576, where a training step was still as fast as in eager torch, or faster.
        row_elements=16,
        uneven_adapted_from={False: 768, True: 1600},
    ),
    hidden_gradient=HiddenGradient(
        faster_from={False: (2**37, 2**36), True: (2**39, 2**36)},  # launching it costs the host 0.3 ms
        least_width=512,  # narrower ones were slower than what torch.compile makes of them
        # 32,768 rows × (512, 2048) 189 instead of 213 µs, 16,384 × (1024, 4096) 248 instead of 269; at 8192 × (2048,
        # 8192) they took 516 instead of 422, as each reads all of w_down again and again.
        widest_staying=(1024, 4096),
        least_staying=0.95,  # where it was measured, 0.97
    ),
    # Launched, the host needs 400 to 550 µs for a forward and backward pass, eager torch 280 to 450.
    gemm_reduce=GemmReduce(
        faster_from={
            **{(op, False): _MAXIMUM for op in ("max", "min", "absmax")},
            **{(op, True): _MAXIMUM_GRADIENT for op in ("max", "min", "absmax")},
            **{(op, False): _SUM for op in ("sum", "mean")},
            ("sumsq", False): _SUM_OF_SQUARES,
            ("sumsq", True): ((128, (2**27, 2**24)),),
            # Torch launches more than for the others: a forward pass costs the host 100 to 150 µs, ours 55 to 115.
            ("logsumexp", False): ((128, (2**21, 2**21)), (256, (2**26, 2**26))),
            # Padded inner widths had 0.69 to 1.1 of the speed of torch.compile up to 2^23, but eager torch 0.5.
            ("logsumexp", True): ((128, (2**25, 2**21)),),
        },
        widest_padded=128,
        algebraic_from={False: (3 * 2**24, 2**24), True: (2**26, 2**20)},
        # Forward, on an H100, the kernel took 0.41 to 1.0 of its time with fewer, but for one of 17 sizes (1.15), and
        # 0.79 to 1.85 at seven with more.
        algebraic_slower_below=2**26,
    ),
    # For d = 128. Launched, the host needs as long as for torch's forward pass, and with backward 0.83 to 0.95 of that.
    maxsim=MaxSim(faster_from={False: (3 * 2**22, 2**20), True: (2**22, 2**20)}, widest=128),
    # With more weights than these cuBLAS gains more from its clusters, which share what they copy, than one pass over
    # dy saves.
    weight_gradient=WeightGradient(
        # Launched, a layer's forward and backward pass took the host 210 to 440 µs, torch's device 264 µs at 2**35.
        faster_from={True: (2**36, 2**31), False: None},
        most_weights=2**18,
        # At 60 random sizes: 0.94 to 1.97 of the best of torch's speed up to these, 0.53 to 1.3 beyond; 1.05 to 1.24
        # with many rows. A kernel for the sums beside cuBLAS had 0.93 to 1.14 of the speed of what torch.compile makes
        # of both, eager torch 0.26 to 1.
        alone_faster_from=(2**31, 6 * 2**28),  # replayed, 0.88 to 1.08 of the speed of torch.compile below
        many_rows=2**15,
        most_weights_alone=(2**16, 19 * 2**14),
        narrow=256,
        summed_from=(2**20, 2**20),
        # 0.97 to 1.05 of the speed of torch.compile at 2,128 to 3,360 columns, torch's own sums 0.88 to 0.94.
        summed_columns=8192,
    ),
    # From random products with up to 512 rows, against torch in a CUDA graph.
    linear=Linear(
        faster_from=(2**28, 2**18),  # a training step costs the host 218 to 317 µs, torch's 162 to 207
        # Launched, without gradients, 1.06 to 1.08 times as fast as torch at 118 and 134 million bytes, 0.75 at 67
        # million. A product that is not split is one launch, which costs the host no more than torch's does.
        split_faster_from=7 * 2**24,
        most_rows=512,
        # With more rows and columns torch's own splits were as fast; but where its columns are no whole number of
        # vectors, its kernels took 1.3 to 5 times as long as these.
        few=64,
        middle=128,
        long=2**17,
        many_columns=1024,
        short=2048,
        few_rows=16,
        wide_columns=8192,  # 0.77 to 0.88 of torch's speed at 8,192 and 14,336
        # Torch was as fast or faster for rows that are not aligned (kernels had 0.09 to 2.7 of its speed, in the median
        # 0.92), but for rows of odd length and more than so many bytes, which its kernels read one by one, and for
        # columns of its result that are no whole number of vectors (0.76 to 10, 1.9).
        unaligned_bytes=2**20,
        # A data gradient reads W across its rows, which torch does better with more rows of its own than these.
        data_gradient_rows=16,
        # Of 90 sizes on an H100 1.0 to 1.43 times as fast as torch (median 1.11) from these on and up to those, but for
        # one (0.95); else 0.82 to 1.31 (1.0).
        data_gradient_inner=2400,
        data_gradient_weights=15 * 2**19,
        # On an H200, replayed, torch's gradients were 1.26 to 4.2 times as fast so at six sizes, 0.6 to 1.13 at five
        # with less.
        padded_from=(2**26, 2**24),
    ),
    # Launching the chunked path costs the host 600 to 900 µs; replayed, it took as long as torch.compile at 2^25
    # logits, and 0.79 to 0.98 of its time at 2^27. The fused path took 0.78 launched at 2^25, 0.91 replayed at 2^23.
    linear_cross_entropy=LinearCrossEntropy(
        faster_from={"chunked": (2**27, 2**26), "fused": (2**25, 2**23)},
        fewest_classes=4096,  # a program takes a row, which must keep it busy
    ),
    # Against transformers' experts through torch._grouped_mm, eager and compiled: 1.4 to 1.5 times as fast with 64 and
    # 128 experts, 1.15 with 8 wide ones, 1.4 for 64 tokens in a graph. Launched one by one, a pass costs the host a
    # quarter to a half of what eager torch costs it, whatever the sizes.
    # Weights with rows of an odd multiple of 16 bytes are slow to read across, and in generic kernels to read at all:
    # 0.3 to 0.9 of torch's speed.
    moe_ffn=MoeFFN(faster_from={False: (2**24, 2**30), True: (2**24, 2**32)}, row_elements=16),
    tile_costs=TileCosts(
        clock=1.6e9,
        products_per_cycle=2048,
        share_of_peak=0.92,
        bytes_per_cycle=44,
        bytes_per_second=4.3e12,
        fill_seconds=1.5e-6,
        store_bytes_per_second=25e9,
        reduce_seconds=4e-6,
        partial_bytes_per_second=3.5e12,
    ),
)
