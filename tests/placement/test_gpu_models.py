"""Names of GPUs as drivers and people write them."""

import pytest

from pointsman.placement.gpu_models import KNOWN_GPUS, gpu_vendor, known_gpu, short_gpu_name


@pytest.mark.parametrize(
    ("written", "name", "mib"),
    [
        ("NVIDIA H100 80GB HBM3", "H100", 81559),
        ("H100", "H100", 81559),
        ("h100-80gb", "H100", 81559),
        ("NVIDIA H100 NVL", "H100 NVL", 95830),
        ("NVIDIA A100-SXM4-40GB", "A100", 40960),
        ("A100 80 GB PCIe", "A100", 81920),
        ("NVIDIA L4", "L4", 23034),
        ("NVIDIA L40S", "L40S", 46068),
        ("Tesla T4", "T4", 15360),
        ("Tesla V100-SXM2-32GB", "V100", 32768),
        ("NVIDIA GeForce RTX 3090", "RTX 3090", 24576),
        ("RTX 3090 Ti", "RTX 3090 Ti", 24564),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", 49140),
        ("AMD Instinct MI300X OAM", "MI300X", 196592),
    ],
)
def test_models_that_are_known(written: str, name: str, mib: int) -> None:
    found = known_gpu(written)
    assert found is not None
    assert (found.name, found.memory_bytes) == (name, mib * 2**20)


@pytest.mark.parametrize("written", ["", "A100", "RTX 3080 Ti", "RTX 3080 12GB", "RTX 4090 Laptop GPU", "L5", "24GB"])
def test_models_that_could_be_several_or_none_are_not_guessed(written: str) -> None:
    assert known_gpu(written) is None


@pytest.mark.parametrize(
    ("written", "vendor", "short"),
    [
        ("NVIDIA H100 80GB HBM3", "nvidia", "H100 80GB"),
        ("NVIDIA Something New", "nvidia", "Something New"),
        ("Radeon Pro W7900", "amd", "Pro W7900"),
        ("MI999X", "amd", "MI999X"),
        ("Apple M4 Pro", "apple", "Apple M4 Pro"),
        ("Intel Arc B580", "intel", "Intel Arc B580"),
        ("NVIDIA", "nvidia", "NVIDIA"),
        ("Voodoo", "", "Voodoo"),
    ],
)
def test_makers_and_short_names(written: str, vendor: str, short: str) -> None:
    assert (gpu_vendor(written), short_gpu_name(written)) == (vendor, short)


def test_every_full_name_means_its_model() -> None:
    assert [known_gpu(one.full_name) for one in KNOWN_GPUS] == list(KNOWN_GPUS)
    for one in KNOWN_GPUS:
        assert 0.9 < one.memory_bytes / (one.nominal_gb * 2**30) < 1.03
