from dataclasses import replace

import pytest

from trainer import gpu
from trainer.errors import ImpastoError
from trainer.memory.device.gpu_specs import find_gpu, known_gpus, specs_of

MIB = 1 << 20
GIB = 1 << 30


def real(name, total=8 * GIB, capability=(8, 6), free=4 * GIB):
    return gpu.Gpu(0, "GPU-0", name, total, free, "581.15", (13, 0), capability, ())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 3060", "RTX 3060 12GB"),
        ("3060 8gb", "RTX 3060 8GB"),
        ("rtx3060 12 GB", "RTX 3060 12GB"),
        ("4060ti 16", "RTX 4060 Ti 16GB"),
        ("RTX 4070 Ti SUPER", "RTX 4070 Ti Super 16GB"),
        ("4070 super", "RTX 4070 Super 12GB"),
        ("4090D", "RTX 4090 D 24GB"),
        ("3080 mobile", "RTX 3080 Laptop 8GB"),
        ("RTX 3060 Laptop", "RTX 3060 Laptop 6GB"),
        ("NVIDIA GeForce GTX 1060 6GB", "GTX 1060 6GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("NVIDIA H100 PCIe", "H100 PCIe 80GB"),
        ("Tesla T4", "T4 16GB"),
        ("6gb", "RTX 2060 6GB"),
        (" 8 GB ", "RTX 4060 8GB"),
        ("12", "RTX 3060 12GB"),
        ("24GiB", "RTX 4090 24GB"),
        ("4GB", "RTX 3050 Laptop 4GB"),
        ("gtx1650", "GTX 1650 4GB"),
        ("20 gb", "RTX 4000 Ada 20GB"),
        ("NVIDIA TITAN RTX", "Titan RTX 24GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 96GB"),
        ("8.0 GB", "RTX 4060 8GB"),
        ("8192MB", "RTX 4060 8GB"),
        ("RTX 3060, 12288 MiB.", "RTX 3060 12GB"),
    ],
)
def test_cards_are_found_as_people_write_them(text, name):
    assert find_gpu(text).name == name


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("RTX 3065", "RTX 3060, "),
        ("4070 tii", "RTX 4070 Ti, "),
        ("3060 24gb", "RTX 3060 12GB, RTX 3060 8GB"),
        ("7GB", "6, 8, 10, 11, 12"),
        ("8.5GB", "6, 8, 10, 11, 12"),
        ("8 12", "such as 8GB"),
        ("Radeon RX 7900", "such as 8GB"),
        ("RTX 4070 Ultra", "RTX 4070 Ti, "),
        ("", "such as 8GB"),
    ],
)
def test_what_is_no_card_is_refused_with_near_names(text, hint):
    with pytest.raises(ImpastoError) as caught:
        find_gpu(text)
    assert caught.value.code == "gpu.unknown"
    assert hint in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "bf16", "fp16", "tf32"),
    [
        ("RTX 2080 Ti", None, 53.8, 13.45),
        ("RTX 3060", 25.5, 25.5, 12.7),
        ("RTX 3090", 71.0, 71.0, 35.6),
        ("RTX 4060 Ti", 44.1, 44.1, 22.1),
        ("RTX 4090", 165.2, 165.2, 82.6),
        ("RTX 5090", 209.5, 209.5, 104.8),
        ("RTX A6000", 154.8, 154.8, 77.4),
        ("T4", None, 65.0, 8.1),
        ("L4", 121.0, 121.0, 60.5),
        ("A100", 312.0, 312.0, 156.0),
        ("H200", 989.4, 989.4, 494.7),
    ],
)
def test_rates_are_those_of_the_data_sheets(name, bf16, fp16, tf32):
    """Dense, with fp32 accumulation: half of what GeForce sheets print first."""
    card = find_gpu(name)
    assert card.tflops["float16"] == pytest.approx(fp16, rel=0.01)
    assert card.tflops["tf32"] == pytest.approx(tf32, rel=0.01)
    assert card.tflops.get("bfloat16") == (None if bf16 is None else pytest.approx(bf16, rel=0.01))


def test_every_card_of_the_table_is_plausible_and_found_by_its_own_name():
    assert {card.gigabytes for card in known_gpus()} >= {6, 8, 10, 11, 12, 16, 24, 32}
    for card in known_gpus():
        assert find_gpu(card.name) is card
        assert 0.93 < card.total_bytes / (card.gigabytes * GIB) <= 1.0
        assert card.bf16 == ("bfloat16" in card.tflops)
        assert 2.5 < card.tflops["float32"] <= card.tflops["float16"] < 1000
        assert 120e9 < card.bandwidth < 5e12
        assert card.source
        assert set(card.unsure) <= {"mib", "fp32", "half"}


def test_a_card_that_is_here_keeps_its_name_and_memory_and_gets_the_rates_of_its_model():
    here = specs_of(real("NVIDIA GeForce RTX 4060 Ti", 16380 * MIB, (8, 9)))
    assert (here.name, here.gigabytes) == ("NVIDIA GeForce RTX 4060 Ti", 16)
    assert here.tflops == find_gpu("4060 Ti 16GB").tflops
    assert here.unsure == ()


def test_a_card_that_reports_much_less_than_it_is_sold_with_counts_as_sold():
    assert specs_of(real("Tesla T4", 15360 * MIB, (7, 5))).gigabytes == 16


def test_a_card_that_is_not_listed_borrows_from_the_nearest_of_its_generation_and_says_so():
    here = specs_of(real("NVIDIA RTX 4500 Ada Generation", 24570 * MIB, (8, 9)))
    assert (here.gigabytes, here.total_bytes, here.unsure) == (24, 24570 * MIB, ("rates",))
    assert here.tflops == find_gpu("RTX 4090").tflops


def test_here_is_the_card_with_most_free_memory(monkeypatch):
    found = [
        real("NVIDIA GeForce RTX 3060", 12 * GIB),
        real("NVIDIA GeForce RTX 3090", 24 * GIB, free=9 * GIB),
    ]
    monkeypatch.setattr(gpu, "list_gpus", lambda: found)
    assert find_gpu("Here").name == "NVIDIA GeForce RTX 3090"


def test_here_without_a_card_is_told(monkeypatch):
    monkeypatch.setattr(gpu, "list_gpus", list)
    with pytest.raises(ImpastoError) as caught:
        find_gpu("here")
    assert caught.value.code == "gpu.none"
    assert "--gpu" in caught.value.remedy


def test_the_link_of_an_installed_gpu_is_known():
    installed = replace(real("NVIDIA GeForce RTX 3060 Ti"), bus=15.75e9)
    assert specs_of(installed).bus == 15.75e9
    assert find_gpu("RTX 3060 Ti").bus is None
