"""Chat traffic with pictures against any OpenAI-compatible endpoint.

    python -m locust -f benchmarks/load/locustfile.py --host http://127.0.0.1:8000 \
        --retention 1.0,0.333,0.111

opens locust's page at http://127.0.0.1:8089; `--headless -u 8 -t 60s` runs without it. Without
`--retention` the requests are plain OpenAI requests, which stock vLLM takes too.

Each user holds conversations of one to three turns about a picture, which is new or one that was
asked about before, of one of several sizes. Answers are streamed. Locust's table has a row for
each time and retention:

    latency    the whole answer, in ms
    TTFT       time to the first token of a conversation's first answer, in ms; later answers, whose
               picture the server knows already, have a row of their own
    TPOT       time per output token after the first, in ms

`--answers-file` keeps every single answer as JSON, for `python -m benchmarks.load report`.
"""

import argparse
import json
import logging
import os
import random
from pathlib import Path
from typing import Any

from locust import User, between, events, task
from locust.env import Environment

from benchmarks.shared.client import Answer, Client, ServerError
from benchmarks.shared.pictures import SIZES, picture_url
from benchmarks.shared.retention_mix import parse_mix, show_retention

QUESTIONS = (
    "What is in this picture?",
    "Which shape is yellow?",
    "How many circles are there?",
    "Is there a red square in the image?",
    "What does the sign say? Answer with a single word.",
    "Describe the image in detail.",
)
FOLLOW_UPS = (
    "And what is on the left of it?",
    "Which colour is it?",
    "Are you sure?",
    "What else is there?",
)
MAX_TURNS = 3
# Pictures that come back, as a shop's products or a forum's latest post do.
NUM_POPULAR_PICTURES = 16


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    """Add the options of this file to locust's command line and page."""
    # Not in a group: locust shows only what was added to the parser itself.
    parser.add_argument(
        "--retention",
        type=_checked_mix,
        default="",
        metavar="MIX",
        help="Retentions to send, each equally often: 1.0,0.333,0.111. Naming one twice doubles "
        "its share; `default` sends none. Empty: never send one (stock vLLM).",
    )
    parser.add_argument(
        "--repeated-pictures",
        type=float,
        default=0.25,
        metavar="SHARE",
        help="Share of conversations about one of 16 pictures that come again and again; "
        "default: %(default)s",
    )
    parser.add_argument("--max-tokens", type=int, default=24, help="default: %(default)s")
    parser.add_argument(
        "--max-conversations",
        type=int,
        default=0,
        help="Stop after so many conversations; 0 (the default): until the time is over",
    )
    parser.add_argument(
        "--chat-model", default="", help="Name of the model; default: the first one served"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--answers-file",
        default="",
        include_in_web_ui=False,
        help="Where to write every answer's times and tokens as JSON; default: nowhere",
    )


def _checked_mix(text: str) -> str:
    """Check the mix early; it stays text, which locust's page can show and change."""
    try:
        parse_mix(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


class Traffic:
    """What the users of one run share: the mix, the conversations so far, and all answers."""

    def __init__(self, options: Any, first_picture: int = NUM_POPULAR_PICTURES) -> None:
        self.mix = parse_mix(options.retention)
        self.options = options
        self.num_conversations = 0
        self.is_over = False
        self.answers: list[dict[str, Any]] = []
        self._first_picture = first_picture
        self._chance = random.Random(options.seed + first_picture)

    def next_conversation(self) -> "Conversation | None":
        """Return the next conversation; None when there have been enough."""
        number = self.num_conversations
        if number >= self.options.max_conversations > 0:
            return None
        self.num_conversations += 1
        # Round robin: every retention gets its share however short the run is.
        retention = self.mix[number % len(self.mix)]
        is_popular = self._chance.random() < self.options.repeated_pictures
        popular = self._chance.randrange(NUM_POPULAR_PICTURES)
        picture = popular if is_popular else self._first_picture + number
        return Conversation(
            retention=retention,
            is_popular=is_popular,
            picture=picture,
            # A popular picture keeps its size, or it would be another picture.
            size=SIZES[picture % len(SIZES)],
            questions=(
                self._chance.choice(QUESTIONS),
                *self._chance.sample(FOLLOW_UPS, self._chance.randrange(MAX_TURNS)),
            ),
        )


class Conversation:
    """One to three questions about a picture, and what was said so far."""

    def __init__(
        self,
        retention: float | None,
        is_popular: bool,
        picture: int,
        size: tuple[int, int],
        questions: tuple[str, ...],
    ) -> None:
        self.retention = retention
        self.is_popular = is_popular
        self.size = size
        self.questions = questions
        self.messages: list[dict[str, Any]] = []
        self._picture = picture

    def ask(self, question: str) -> None:
        """Add a question; the first one brings the picture."""
        content: list[dict[str, Any]] = [{"type": "text", "text": question}]
        if not self.messages:
            url = {"url": picture_url(self._picture, self.size)}
            content.insert(0, {"type": "image_url", "image_url": url})
        self.messages.append({"role": "user", "content": content})

    def hear(self, text: str) -> None:
        """Add an answer."""
        self.messages.append({"role": "assistant", "content": text})


class ChatUser(User):
    """Somebody who asks about pictures."""

    wait_time = between(0.1, 0.5)

    def on_start(self) -> None:
        """Find out the model's name, once; a user without a model or a mix stays silent."""
        self.traffic: Traffic | None = getattr(self.environment, "chat_traffic", None)
        host = self.host or self.environment.host or ""
        self.client = Client(host, os.environ.get("OPENAI_API_KEY"))
        self.model = self.environment.parsed_options.chat_model
        try:
            self.model = self.model or self.client.models()[0]["id"]
        except ServerError as error:
            self._report("models", "GET /v1/models", 0, error)

    @task
    def converse(self) -> None:
        """Hold one conversation to its end, or to its first failure."""
        if self.traffic is None or not self.model:
            return
        conversation = self.traffic.next_conversation()
        if conversation is None:
            self._end_run()
            return
        for turn, question in enumerate(conversation.questions, start=1):
            conversation.ask(question)
            answer = self._answer(conversation, turn)
            if answer is None:
                return
            conversation.hear(answer.text)

    def _end_run(self) -> None:
        """Stop all users once the others are done with what they are at, see --stop-timeout."""
        assert self.traffic is not None
        if not self.traffic.is_over:
            self.traffic.is_over = True
            runner = self.environment.runner
            stop = runner.quit if self.environment.web_ui is None else runner.stop
            # In a greenlet of its own, because stopping waits for this one.
            runner.greenlet.spawn(stop)

    def _answer(self, conversation: Conversation, turn: int) -> Answer | None:
        assert self.traffic is not None
        body: dict[str, Any] = {
            "model": self.model,
            "messages": conversation.messages,
            "max_tokens": self.traffic.options.max_tokens,
            "temperature": 0,
        }
        if conversation.retention is not None:
            body["retention"] = conversation.retention
        name = show_retention(conversation.retention)
        try:
            answer = self.client.ask(body)
        except ServerError as error:
            self._report("latency", name, 0, error)
            return None
        self._report("latency", name, answer.latency)
        self._report("TTFT", name if turn == 1 else f"{name}, later turns", answer.ttft)
        if (seconds := answer.seconds_per_output_token) is not None:
            self._report("TPOT", name, seconds)
        self.traffic.answers.append(
            {
                "retention": conversation.retention,
                "turn": turn,
                "popular": conversation.is_popular,
                "width": conversation.size[0],
                "height": conversation.size[1],
                "ttft": answer.ttft,
                "latency": answer.latency,
                "tpot": seconds,
                "prompt_tokens": answer.prompt_tokens,
                "output_tokens": answer.output_tokens,
                "visual_tokens": answer.visual_tokens,
                "visual_tokens_total": answer.visual_tokens_total,
            }
        )
        return answer

    def _report(self, kind: str, name: str, seconds: float, error: Exception | None = None) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=seconds * 1000,
            response_length=0,
            exception=error,
            context=self.context(),
        )


@events.test_start.add_listener
def start_traffic(environment: Environment, **_: object) -> None:
    """Read the options anew: locust's page may have changed them."""
    environment.chat_traffic = None  # type: ignore[attr-defined]
    # The workers of a distributed run must not send the same new pictures.
    first_picture = NUM_POPULAR_PICTURES + 10**6 * getattr(environment.runner, "worker_index", 0)
    try:
        environment.chat_traffic = Traffic(  # type: ignore[attr-defined]
            environment.parsed_options, first_picture
        )
    except ValueError as error:
        logging.error("%s", error)
        environment.events.request.fire(
            request_type="option", name="--retention", response_time=0, response_length=0,
            exception=error, context={},
        )  # fmt: skip


@events.report_to_master.add_listener
def send_answers(client_id: str, data: dict[str, Any]) -> None:
    """Hand the answers of a distributed run's worker over to its master."""
    if _environment is not None and (traffic := getattr(_environment, "chat_traffic", None)):
        data["answers"], traffic.answers = traffic.answers, []


@events.worker_report.add_listener
def receive_answers(client_id: str, data: dict[str, Any]) -> None:
    """Take the answers of a worker."""
    if _environment is not None and (traffic := getattr(_environment, "chat_traffic", None)):
        traffic.answers += data.get("answers", [])


@events.quitting.add_listener
def write_answers(environment: Environment, **_: object) -> None:
    """Write the answers when locust ends."""
    options = environment.parsed_options
    traffic = getattr(environment, "chat_traffic", None)
    if options is not None and options.answers_file and traffic is not None:
        path = Path(options.answers_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(traffic.answers))


_environment: Environment | None = None


@events.init.add_listener
def remember_environment(environment: Environment, **_: object) -> None:
    """Keep the environment for the two events that do not bring it."""
    global _environment
    _environment = environment
