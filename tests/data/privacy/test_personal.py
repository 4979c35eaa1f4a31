"""Personal data: each kind with a case on each side of its proof, code that keeps its numbers, labelled sentences, the
step."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.schema import PersonalDataRecipe
from infra.step import Output, Record, step
from tasks.data.privacy.mask_personal_data import mask_personal_data
from tasks.data.privacy.personal_data import KINDS, find_spans, mask_text
from tasks.data.records.documents import PREPARED_COLUMNS, arrow_schema, content_digest, document_id
from tests.support.data_inputs import SHARED_DATA, compute, in_partitions, rows

AWS_KEY = "AKIA" + "ABCDEFGHIJKLMNOP"
GITHUB_TOKEN = "ghp_" + "a1B2" * 9
PRIVATE_KEY = "-----BEGIN " + "PRIVATE KEY-----\nMIIEvQIBADANBgkq\nhkiG9w0BAQEF\n-----END " + "PRIVATE KEY-----"
FOUND = {
    "secret": [
        AWS_KEY,
        GITHUB_TOKEN,
        PRIVATE_KEY,
        "npm_" + "a1B2" * 9,
        "SG." + "a" * 22 + "." + "b" * 43,
        "dop_v1_" + "a1b2" * 16,
        "shippo_live_" + "a1b2" * 10,
        "a1b" + "8Q~" + "a1B2" * 8,
    ],
    "email": [
        "jane.doe+news@mail.kernel.org",
        "Jürgen@posteo.de",
        "o'neil@bbc.co.uk",
        "jane@müller.de",
        "anna@büro-online.at",
        "пётр@почта.рф",
        "用户@例子.中国",
        "name@xn--mller-kva.de",
        "name@firma.xn--p1ai",
    ],
    "iban": ["DE89370400440532013000", "GB82 WEST 1234 5698 7654 32", "gb82west12345698765432"],
    "credit_card": ["4111111111111111", "5500-0000-0000-0004", "3400 000000 00009"],
    "us_ssn": ["078-05-1120", "219-09-9999"],
    "ip_address": ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"],
    "phone": [
        "+49 (0)30 901820",
        "+14155552671",
        "(415) 555-2671",
        "415-555-2671 ext. 12",
        "1-800-555-2671",
        "(030) 901 820 99",
        "01 42 68 53 00",
        "01.42.68.53.00",
        "020 7946 0958",
        "0171 1234567",
        "03-1234-5678",
        "8 (495) 123-45-67",
        "0049 30 901820",
    ],
}
LEFT = {
    "secret": [
        "AKIA",
        "ghp_short",
        "task-oriented-and-rather-long-hyphenated-words",
        "-----BEGIN CERTIFICATE-----\nMIIE",
    ],
    "email": [
        "someone@example.com",
        "git@github.com",
        "a@b",
        "@decorator",
        "x@localhost",
        "dev\n@click.group()",
        "icon@2x.png",
        "foo@v1.2.3",
        "x@y-.de",
        "w@x.T",
    ],
    "iban": ["DE89370400440532013001", "GB82 WEST 1234 5698 7654", "XX89370400440532013000"],
    "credit_card": [
        "4111111111111112",
        "9111111111111111",
        "411111111111116",
        "0.4111111111111111",
        "0000000000000000",
    ],
    "us_ssn": ["000-12-3456", "666-12-3456", "900-12-3456", "123-00-4567", "123-45-0000", "1123-45-67890"],
    "ip_address": [
        "192.168.0.1",
        "127.0.0.1",
        "10.0.0.7",
        "1.2.3.4",
        "3.11.0.256",
        "1.22.3.4.5",
        "std::chrono",
        "230.0.0.4",
        "fe80:1:2:3:4:5:6:7",
        "31.13.24.0/21",
        "version 12.4.3.10",
        "Python 3.11.7.22",
        "section 12.4.3.10",
        "2606:2800:220::/48",
    ],
    "phone": [
        "2000-04-16 11",
        "1234567890",
        "3.14159265358979",
        "8253/8254",
        "0123456789",
        "ISBN 978-3-16-148410-0",
        "0-306-40615-2",
        "21-15 21-18 19-21",
        "1609459200",
        "12:34:56:78",
        "550e8400-e29b-41d4-a716-446655440000",
        "1234567890123456789012345678901234567890",
        "(1999) 123-456",
        "123-456-7890",
        "1,234,567,890",
        "12 345 678",
    ],
}


WRITTEN_OTHERWISE = {
    "credit_card": ["4111\u00a01111\u00a01111\u00a01111", "4111  1111  1111  1111"],
    "email": [
        "jane (at) posteo (dot) de",
        "jane[at]posteo.de",
        "jane&#64;posteo.de",
        "jane＠posteo.de",
        "jane at posteo dot de",
    ],
    "iban": ["DE89\u00a03704\u00a00044\u00a00532\u00a00130\u00a000"],
}
NATIONAL = {
    "de": ["0171-2345678", "030/1234567"],
    "fr": ["0612345678", "01-42-68-53-00"],
    "en": ["022-2345 6789", "98765 43210"],
    "zh": ["13812345678"],
    "pt": ["(11) 91234-5678"],
    "es": ["612 345 678"],
}
LISTS_AND_COUNTS = {
    "fr": ["Résultats 01 02 03 04 05"],
    "es": ["en total 612 345 678 personas"],
    "de": ["Konto 1234567890"],
    "en": [
        "call 1234567 times",
        "reach 1000000 users",
        "message 20210315123456",
        "pages 3100-3999",
        "0.3333333333",
        "Luke 12.34.5.67",
        "p@ssw0rd.txt",
    ],
}


def test_what_is_written_another_way_is_found_too():
    for kind, values in WRITTEN_OTHERWISE.items():
        for value in values:
            assert find_spans([f"It is {value}, so."]) == [[(kind, 6, 6 + len(value))]], value


def test_a_national_number_is_found_by_the_plan_of_where_its_language_is_spoken():
    for language, values in NATIONAL.items():
        for value in values:
            assert find_spans([f"({value})"], languages=[language]) == [[("phone", 1, 1 + len(value))]], value
    assert find_spans(["手机13812345678", "电话：138-1234-5678"]) == [[("phone", 2, 13)], [("phone", 3, 16)]]
    for language, texts in LISTS_AND_COUNTS.items():
        assert find_spans(texts, languages=[language] * len(texts)) == [[]] * len(texts), language


def test_a_card_in_a_parameter_is_found_where_the_parameter_says_so():
    assert find_spans(["card=4111111111111111&cvv=1", "id=4111111111111111&x=1"]) == [[("credit_card", 5, 21)], []]


def test_a_password_is_masked_and_its_url_is_no_address():
    assert find_spans(
        ["postgres://admin:s3cretP4ss@db.posteo.de:5432/x", "postgres://user:password@db.posteo.de/x"]
    ) == [[("secret", 17, 27)], []]


@pytest.mark.parametrize("sign", [" = ", ": ", "=", '": '])
def test_what_is_called_a_secret_is_one_where_it_looks_drawn(sign):
    for value, is_secret in (
        ("kJ8#mVq2!x", True),
        ("f3a9c1d27b604e85f3a9", True),
        ("your-api-key1", False),
        ("changeme", False),
        ("xxxxxxxxxxx1", False),
        ("374eae6e-4cdb-4a8f-5243-48750acd1c9c", False),
        ("xvhkfn28nx8d2pw68cthayv83y3niys4enaaqydn", True),
        ("production_environment_v2_settings1", False),
    ):
        text = f'api_key{sign}"{value}"'
        start = text.index(value)
        assert find_spans([text]) == [[("secret", start, start + len(value))] if is_secret else []], text
    assert find_spans(['num_layers = "kJ8#mVq2!x"', "password = getpass.getpass(1)", "password: str"]) == [[], [], []]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("define('DB_PASSWORD', 'S3cr3t!pass9');", "S3cr3t!pass9"),
        ('headers.Set("X-Api-Key", "DyVdf7cAXw4MH9gT1C")', "DyVdf7cAXw4MH9gT1C"),
        ('<add key="Password" value="S3cr3tPw99x"/>', "S3cr3tPw99x"),
        ('bugsnagToken := "wz9450iuQiewm8jonx"', "wz9450iuQiewm8jonx"),
        ("The password is Xk29!asdfQ. Keep it.", "Xk29!asdfQ"),
        ("run --db-password S3cr3tPw99x now", "S3cr3tPw99x"),
        ("Authorization: Bearer abcDEF123456ghiJKL7890", "abcDEF123456ghiJKL7890"),
        ("The password is case-sensitive and required.", ""),
        ('set("token", "text and 12 more words")', ""),
        ("['DH_PRIV_KEY_INFO', 'PBE2PARAM_st']", ""),
    ],
)
def test_a_secret_is_called_one_in_calls_attributes_options_headers_and_sentences(text, value):
    start = text.find(value)
    assert find_spans([text]) == [[("secret", start, start + len(value))] if value else []]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("GITHUB_TOKEN: c3766311e2ee9f343e69aad80b891badaf9d0d0d", "c3766311e2ee9f343e69aad80b891badaf9d0d0d"),
        ("<server><password>Xk9mQ2vLp7</password></server>", "Xk9mQ2vLp7"),
        ("Authorization: Basic YWRtaW46UzNjcmV0UGFzcyE5", "YWRtaW46UzNjcmV0UGFzcyE5"),
        ("some_tokenizer: Llama3TokenizerFast", ""),
        ("<password>your-password1</password> <name>Xk9mQ2vLp7</name>", ""),
        ("Authorization: Basic dXNlcjpwYXNzd29yZA==", ""),
        ("Basic communication12345", ""),
        (f"integrity sha512-{'aB3dE5gH7jK9mN1pQ4sT' * 4}xY2zW8==", ""),
    ],
)
def test_tokens_elements_and_headers_hold_secrets_and_checksums_do_not(text, value):
    start = text.index(value)
    assert find_spans([text]) == [[("secret", start, start + len(value))] if value else []]


def test_an_address_in_a_script_without_spaces_is_cut_from_its_sentence():
    assert find_spans(["邮箱zhang_wei88@qq.com欢迎", "写信给zhang@qq.com。", "用户@例子.公司"]) == [
        [("email", 2, 20)],
        [("email", 3, 15)],
        [("email", 0, 8)],
    ]


def test_numbers_in_other_digits_are_phone_numbers_too():
    for text in ("الهاتف: ٠١٠١٢٣٤٥٦٧٨", "تلفن: ۰۲۱-۸۸۷۷۶۶۵۵", "फोन: ०९८७६ ५४३२१"):
        start = text.index(" ") + 1
        assert find_spans([text], languages=["ar"]) == [[("phone", start, len(text))]], text


def test_a_date_and_a_clause_after_a_word_like_cell_are_no_phone_numbers():
    assert find_spans(
        ["more than one cell. 20040508 replaces it", "as in Clause 252.227-7013 (c)", "Tlf. 20999999"]
    ) == [[], [], [("phone", 5, 13)]]


def test_a_post_code_is_no_phone_number_and_a_new_version_no_address():
    licence = "51 Franklin Street, Fifth Floor, Boston, MA 02110-1301, USA"
    assert find_spans([licence, "Bump to 1.0.99.4", "upgrade x from 1.0.99.3 to 1.0.99.4"]) == [[], [], []]
    assert find_spans(["connect to 81.2.69.144", "Tel. 02110-1301"], languages=["en", "de"]) == [
        [("ip_address", 11, 22)],
        [("phone", 5, 15)],
    ]


def test_a_private_key_is_masked_also_where_its_end_is_cut_off():
    head, line = "-----BEGIN " + "RSA PRIVATE KEY-----\n", "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC/+8\n"
    for text in (head + 3 * line, head + 2 * line + line[:9], f"x = '{head}{line}".replace("\n", "\\n")):
        start = text.index("-----BEGIN")
        (span,) = find_spans([f"{text}\n\nThe end of the story."])[0]
        assert span[:2] == ("secret", start) and span[2] >= len(text.rstrip()) - 2
    assert find_spans([f"{head}is how it begins"]) == [[]]


def test_forms_and_traps_that_the_rules_were_not_written_for():
    from benchmarks.data.personal_data import missed_forms, sprung_traps
    from benchmarks.inputs.personal_data_forms import UNSEEN, UNSEEN_TRAPS

    assert len(missed_forms(UNSEEN, seed=7)) <= len(UNSEEN) * 0.05
    assert len(sprung_traps(UNSEEN_TRAPS, seed=7)) <= len(UNSEEN_TRAPS) * 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_found_as_a_whole_and_what_only_looks_like_it_is_left(kind):
    for value in FOUND[kind]:
        text = f"It is {value}, as said."
        assert find_spans([text]) == [[(kind, 6, 6 + len(value))]], value
        assert find_spans([text], [other for other in KINDS if other != kind])[0] in (
            [],
            find_spans([text], ["phone"])[0],
        )
    for value in LEFT[kind]:
        assert not [span for span in find_spans([f"It is {value} as said."], [kind])[0]], value


def test_a_bare_number_is_a_phone_number_where_it_is_called_one():
    assert find_spans(["Phone: 451 5986. In all 451 5986 men."], ["phone"]) == [[("phone", 7, 15)]]


def test_a_social_security_number_that_is_called_one_needs_no_hyphens():
    for text, start in (
        ("SSN: 123 45 6789", 5),
        ("his social security number is 123456789", 30),
        ("123 45 6789", None),
        ("SSN: 000456789", None),
    ):
        assert find_spans([text], ["us_ssn"]) == [[] if start is None else [("us_ssn", start, len(text))]], text


def test_the_first_kind_counts_where_two_overlap_and_texts_do_not_touch():
    assert find_spans(["Fax: 4111111111111111"]) == [[("credit_card", 5, 21)]]
    assert find_spans(["Phone:", "4515986"]) == [[], []]
    assert find_spans(["see 93.184.216.", "34 and a", "@posteo.de", "", "93.184.216.34"]) == [
        [],
        [],
        [],
        [],
        [("ip_address", 0, 13)],
    ]


def test_a_network_is_no_address_and_a_path_behind_an_address_is_none_either():
    assert find_spans(["from 31.13.24.0/21.", "see 31.13.24.7/2020/a, 31.13.24.7/21/b"], ["ip_address"]) == [
        [],
        [("ip_address", 4, 14), ("ip_address", 23, 33)],
    ]


def test_masking_replaces_the_spans_alone():
    text = "Write to jane@posteo.de or call +1 415-555-2671."
    assert mask_text(text, find_spans([text])[0]) == "Write to <EMAIL> or call <PHONE>."
    assert mask_text("nothing here", []) == "nothing here"


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="labelled sentences are not here")
def test_labelled_sentences_give_recall_and_precision():
    """The forms were written with these sentences at hand: a figure for what has such a form, not for text that nobody
    looked at."""
    names = {
        "EMAIL_ADDRESS": "email",
        "PHONE_NUMBER": "phone",
        "CREDIT_CARD": "credit_card",
        "IBAN_CODE": "iban",
        "IP_ADDRESS": "ip_address",
        "US_SSN": "us_ssn",
    }
    with gzip.open(SHARED_DATA / "safety" / "pii_spans.jsonl.gz", "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    counts: Counter[str] = Counter()
    for record, spans in zip(records, find_spans([record["text"] for record in records]), strict=True):
        labelled = {
            (names[span["type"]], span["start"], span["end"]) for span in record["spans"] if span["type"] in names
        }
        counts.update(labelled=len(labelled), detected=len(spans), both=len(labelled & set(spans)))
    assert counts["both"] / counts["labelled"] > 0.95 and counts["both"] / counts["detected"] > 0.95, counts


class ToyDocuments(Record):
    num_documents: int
    num_bytes: int


def toy_documents() -> list[dict]:
    texts = [
        ("web", f"Mail jane@posteo.de, number {number}. Call 415-555-2671 or {number}@posteo.de.")
        for number in range(40)
    ]
    texts += [("web", f"Nothing to hide, {number}.") for number in range(20)]
    texts += [
        ("code", f'HOST = "93.184.216.34"  # {number}\nCARD = "4111111111111111"\n__author__ = "jane@posteo.de"\n')
        for number in range(9)
    ]
    empty = dict.fromkeys(("collection", "url", "licence", "lang", "repository", "path", "cluster"), "")
    return [
        {
            **empty,
            "id": document_id("toy", number, 0),
            "source": "toy",
            "offset": number,
            "piece": 0,
            "domain": domain,
            "text": text,
            "content_digest": content_digest(text),
            "num_chars": len(text),
            "num_bytes": len(text.encode()),
            "split": "train",
            "language": "en",
            "quality": 0.5,
            "quality_bucket": 2,
        }
        for number, (domain, text) in enumerate(texts)
    ]


@step(content=("documents/*.parquet",))
def write_documents(*, output: Output) -> ToyDocuments:
    table = pa.Table.from_pylist(
        sorted(toy_documents(), key=lambda row: row["id"]), schema=arrow_schema(PREPARED_COLUMNS)
    )
    pq.write_table(table, output.path("documents/part-00000.parquet"))
    return ToyDocuments(num_documents=table.num_rows, num_bytes=sum(table["num_bytes"].to_pylist()))


def test_the_step_masks_counts_and_keeps_the_numbers_of_code_for_any_number_of_partitions(tmp_path):
    source = compute(write_documents, tmp_path)
    recipe = PersonalDataRecipe(kinds=KINDS)
    masked = [
        compute(
            mask_personal_data, tmp_path / str(count), documents=source, recipe=recipe, resources=in_partitions(count)
        )
        for count in (2, 5)
    ]
    assert masked[0].digest == masked[1].digest
    record = masked[0].record
    assert (record.num_documents, record.num_masked_documents) == (69, 49)
    assert record.masked == {**dict.fromkeys(KINDS, 0), "email": 89, "phone": 40}
    before = {row["id"]: row for row in toy_documents()}
    after = {row["id"]: row for row in rows(masked[0], "documents/*.parquet")}
    for identity, row in before.items():
        kinds = KINDS if row["domain"] == "web" else ("secret", "email")
        text = mask_text(row["text"], find_spans([row["text"]], kinds)[0])
        sizes = {"content_digest": content_digest(text), "num_chars": len(text), "num_bytes": len(text.encode())}
        assert after[identity] == {**row, "text": text, **sizes}
    assert sum(row["num_bytes"] for row in after.values()) == record.num_bytes
    assert {row["id"] for row in rows(masked[0], "masked.parquet")} == {
        i for i in before if after[i]["text"] != before[i]["text"]
    }
    assert 'HOST = "93.184.216.34"' in next(row["text"] for row in after.values() if row["domain"] == "code")
