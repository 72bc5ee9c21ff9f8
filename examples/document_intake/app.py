"""A letter comes in as an image; its lines, their languages and their tone go out as one JSON answer.

python examples/document_intake/app.py               in this process
python examples/document_intake/app.py --deploy      every stage in its own process
"""

import io
import json
import sys
from typing import Any, TypeAlias
from urllib.request import Request, urlopen

import numpy as np
import numpy.typing as npt

import pointsman as pm

Image: TypeAlias = npt.NDArray[np.uint8]
"""Height, width, and three colours: blue, green, red, as the OCR models were trained."""

LANGUAGES = ["de", "en", "es", "fr"]
"""What letters are written in here: the fewer there are, the surer is the verdict on a short line."""
SURE = 0.5
"""From this probability on, a verdict counts."""
LARGEST_SIDE = 2000
"""In pixels. Larger images are made smaller: finding text takes time by area."""


# A package is imported where it is used, so that the replicas of a node load only what they need. No stage has a state
# that a call changes, so that a call may be made again if its replica dies: they are idempotent.


@pm.deployment(idempotent=True)
class Detect:
    """Finds the lines of text in an image."""

    def __init__(self) -> None:
        from rapidocr_onnxruntime.ch_ppocr_det import TextDetector

        # By default a wide and low image is made larger until its height is enough: without a bound.
        self.model = TextDetector({**ocr_settings("Det"), "limit_type": "max"})

    def detect(self, image: Image) -> list[Image]:
        """An image of each line, from the top of the page to its bottom."""
        from rapidocr_onnxruntime import RapidOCR

        boxes, _ = self.model(image)
        return [cut_out(image, box) for box in RapidOCR.sorted_boxes(boxes)]


@pm.deployment(idempotent=True)
class Classify:
    """Tells which lines are upside down."""

    def __init__(self) -> None:
        from rapidocr_onnxruntime.ch_ppocr_cls import TextClassifier

        self.model = TextClassifier(ocr_settings("Cls"))

    def classify(self, lines: list[Image]) -> list[Image]:
        """The same lines, upright."""
        upright: list[Image] = self.model(lines)[0]
        return upright


@pm.deployment(idempotent=True)
class Recognise:
    """Reads lines. The most expensive stage, and so the first to need more replicas."""

    def __init__(self) -> None:
        from rapidocr_onnxruntime.ch_ppocr_rec import TextRecognizer

        self.model = TextRecognizer(ocr_settings("Rec"))

    def recognise(self, lines: list[Image]) -> list[str]:
        """What is written there; what is hardly legible is left out."""
        read, _ = self.model(lines)
        return [text for text, confidence in read if confidence >= SURE]


@pm.deployment(idempotent=True)
class Language:
    """Tells languages apart."""

    def __init__(self, languages: list[str]) -> None:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        self.model = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        self.model.set_languages(languages)
        self.model.min_confidence = SURE

    def identify(self, texts: list[str]) -> list[str]:
        """The language of each, as an ISO 639 code; "und" where it is not clear."""
        return [self.model.classify(text)[0] for text in texts]


@pm.deployment(idempotent=True)
class Profanity:
    """Notices rude words."""

    def __init__(self) -> None:
        from profanity_check import predict_prob

        self.model = predict_prob

    def check(self, texts: list[str]) -> list[float]:
        """How likely each is to offend, from 0 to 1."""
        return [round(float(probability), 3) for probability in self.model(texts)] if texts else []


@pm.deployment(idempotent=True)
def join(texts: list[str], languages: list[str], rude: list[float]) -> dict[str, Any]:
    """All that is known of a letter."""
    return {
        "lines": [
            {"text": text, "language": language, "profanity": probability}
            for text, language, probability in zip(texts, languages, rude, strict=True)
        ],
        "languages": sorted(set(languages) - {"und"}),
        "profane": any(probability >= SURE for probability in rude),
    }


async def image_of(request: Any) -> Image:
    """The image in the body of an HTTP request, in any format that Pillow knows."""
    return decoded(await request.body())


with pm.InputNode(preprocessor=image_of) as image:
    detect = Detect.bind()
    classify = Classify.bind()
    recognise = Recognise.bind()
    language = Language.bind(LANGUAGES)
    profanity = Profanity.bind()

    lines = detect.detect.bind(image)
    upright = classify.classify.bind(lines)
    texts = recognise.recognise.bind(upright)
    dag = join.bind(texts, language.identify.bind(texts), profanity.check.bind(texts))


def ocr_settings(stage: str) -> dict[str, Any]:
    """Of one of the three models, as the package has them; each on one thread: more replicas use more cores."""
    from rapidocr_onnxruntime.main import DEFAULT_CFG_PATH, read_yaml, update_model_path

    settings: dict[str, Any] = update_model_path(read_yaml(DEFAULT_CFG_PATH))[stage]
    return {**settings, "intra_op_num_threads": 1, "inter_op_num_threads": 1}


def cut_out(image: Image, box: npt.NDArray[np.float32]) -> Image:
    """What is inside four corners (clockwise from the top left), straightened."""
    import cv2

    sides = np.linalg.norm(box - np.roll(box, -1, axis=0), axis=1)
    width, height = int(max(sides[0], sides[2])), int(max(sides[1], sides[3]))
    target = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    line = cv2.warpPerspective(image, cv2.getPerspectiveTransform(box, target), (width, height), flags=cv2.INTER_CUBIC)
    return np.asarray(line, np.uint8)


def decoded(body: bytes) -> Image:
    """An image file as an array."""
    from PIL import Image as Pictures

    try:
        picture = Pictures.open(io.BytesIO(body))
    except OSError as error:
        raise ValueError("the body is not an image that can be read") from error
    picture.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    return np.ascontiguousarray(np.asarray(picture.convert("RGB"))[..., ::-1])


LETTER = [
    "Dear Miss Weaver,",
    "Thank you for the crate of apples you sent last week.",
    "Merci beaucoup pour les photos de la maison.",
    "The damn postman left it in the rain, what an idiot.",
    "Yours sincerely, Arthur Pike",
]
STAMP = "Received on the third of May"
"""At the foot of the letter, upside down."""


def drawn(lines: list[str] = LETTER, stamp: str = STAMP) -> bytes:
    """A letter as a PNG file."""
    from PIL import Image as Pictures
    from PIL import ImageDraw, ImageFont

    font = ImageFont.load_default(size=30)
    paper = Pictures.new("RGB", (920, 120 + 70 * len(lines)), "white")
    ImageDraw.Draw(paper).text((450, 40), stamp, "black", font)
    paper = paper.rotate(180)
    for number, line in enumerate(lines):
        ImageDraw.Draw(paper).text((50, 30 + 70 * number), line, "black", font)
    file = io.BytesIO()
    paper.save(file, "PNG")
    return file.getvalue()


def main(*, deployed: bool) -> None:
    """Have the letter read: in this process, or by replicas, over HTTP."""
    if deployed:
        handle = pm.build(dag).deploy()
        with urlopen(Request(handle.url, drawn(), {"content-type": "image/png"})) as answer:
            print(json.dumps(json.load(answer), indent=2))
    else:
        print(json.dumps(dag.execute(decoded(drawn())), indent=2))


if __name__ == "__main__":
    main(deployed="--deploy" in sys.argv)
