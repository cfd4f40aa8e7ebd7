"""Texts that the tests of the text wing share."""

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind; it's used to it.",
    "for i in range(10):\n        print(i, x[i] + 1)  # a comment\n\n\treturn None",
    "A quire is a gathering of pages. Pages are gathered, and the gathering is bound.",
    "Größe, naïve café, Straße; 中文字符和日本語のテキスト。한국어 문장입니다.",
    "numbers: 1 22 333 4444 55555, 3.14159 and 2024-01-31",
    "they're we've I'll you'd she's don't can't won't HE'S WE'LL",
]

SAMPLES = [
    *CORPUS,
    "",
    " ",
    " leading and trailing  ",
    "   many    spaces \n\n \t\n mixed\r\n",
    "emoji 🙂 and 👩‍👩‍👧‍👦 and 🎉🎉",
    "unseen ｆｕｌｌ ｗｉｄｔｈ, Ελληνικά, العربية, ½ ² ٣",
    "nul \0 inside",
    "e\u0301 combined",
]
